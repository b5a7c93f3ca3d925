"""The number of blocks follows the setting or the memory, and is never too few for one request."""

import types

import pytest

from models import AttentionFormat, CacheRef, DecoderSpec, LayerSpec
from models.platforms import GPU, TPU
from models.platforms.gpu import SHARE_VARIABLE
from paxkv.config.cache_config import CacheConfig
from paxkv.errors import ConfigError, KVCacheTooSmallError
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.memory.memory_plan import (
    DeviceMemory,
    HostMemory,
    measure_device_memory,
    plan_memory,
    report_memory,
)


# 4 layers x (K and V) x 16 tokens x 2 heads x 32 x 2 bytes = 16,384 bytes per block.
def make_groups(windows, num_ranks=1, **wider):
    """Layers with these windows; `wider` are formats of further layers by their names."""
    formats = {
        f"layer.{i}": AttentionFormat(
            num_kv_heads=2,
            head_dim=32,
            dtype="bfloat16",
            kind="full" if window is None else "window",
            sliding_window=window,
        )
        for i, window in enumerate(windows)
    }
    layers = tuple(
        LayerSpec(name=name, caches=(("kv", CacheRef(format=cache)),))
        for name, cache in (formats | wider).items()
    )
    spec = DecoderSpec(layers=layers)
    return groups_of_spec(spec, block_size=16, num_context_ranks=num_ranks)


MIB = 2**20
GROUPS = make_groups([None] * 4)
BLOCK_BYTES = 16_384


def plan(
    cache_config, memory=None, max_model_len=100, groups=GROUPS, max_num_seqs=64, num_devices=1
):
    return plan_memory(
        groups,
        cache_config,
        max_model_len=max_model_len,
        max_num_batched_tokens=32,
        max_num_seqs=max_num_seqs,
        memory=memory,
        num_devices=num_devices,
    )


def device_memory(total_bytes, *, limit_bytes=None, used_bytes=0, activation_bytes=0):
    return DeviceMemory(
        total_bytes=total_bytes,
        limit_bytes=limit_bytes or total_bytes,
        used_bytes=used_bytes,
        activation_bytes=activation_bytes,
    )


def test_num_gpu_blocks_override_decides():
    memory = device_memory(10**12)
    result = plan(CacheConfig(num_gpu_blocks_override=20), memory)
    assert result.kv_cache_config.num_blocks == 20
    assert result.kv_cache_config.num_rows == 4


def test_cpu_takes_the_configured_bytes():
    result = plan(CacheConfig(cpu_kv_cache_bytes=BLOCK_BYTES * 30 + 5))
    assert result.kv_cache_config.num_blocks == 30
    assert result.pool_bytes == 30 * BLOCK_BYTES


# 100 tokens take 7 blocks; the null block comes on top.
LONGEST_BYTES = 8 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("free_mib", "max_model_len", "max_num_seqs", "wanted_bytes"),
    [
        # What small models get: more than their 64 longest requests.
        (10_000, 100, 64, 256 * MIB),
        # All that can run at once: 3 requests of 1 GiB each.
        (100_000, 2**20, 3, 3 * 2**30 + BLOCK_BYTES),
        # Enough for any.
        (100_000, 2**20, 64, 4 * 2**30),
        # More only if one request is longer than that.
        (100_000, 2**23, 64, 8 * 2**30 + BLOCK_BYTES),
        # Half of the free memory is not enough for what is useful: a power of two.
        (8_191, 2**20, 64, 2 * 2**30),
        (16_383, 2**23, 64, 4 * 2**30),
        (300, 100, 64, 128 * MIB),
        # The longest request alone fits, and the power of two below would not hold it.
        (7_000, 3 * 2**20, 64, 3 * 2**30 + BLOCK_BYTES),
    ],
)
def test_host_pool_has_the_useful_size_up_to_half_of_the_free_memory(
    free_mib, max_model_len, max_num_seqs, wanted_bytes
):
    def pool_bytes(max_model_len):
        memory = HostMemory(free_bytes=free_mib * MIB)
        return plan(
            CacheConfig(), memory, max_model_len=max_model_len, max_num_seqs=max_num_seqs
        ).pool_bytes

    try:
        assert pool_bytes(max_model_len) == wanted_bytes
    except KVCacheTooSmallError as error:
        # The pool stays the same when `max_model_len` falls to the length that fits.
        assert pool_bytes(error.max_fitting_len) == wanted_bytes


def test_free_memory_of_a_host_may_change_by_a_quarter_without_other_programs():
    def num_blocks(free_mib):
        memory = HostMemory(free_bytes=free_mib * MIB)
        return plan(CacheConfig(), memory, max_model_len=2**16).kv_cache_config.num_blocks

    assert {num_blocks(free_mib) for free_mib in range(4_096, 8_192, 97)} == {2**31 // BLOCK_BYTES}
    assert {num_blocks(free_mib) for free_mib in range(8_192, 99_999, 997)} == {
        2**32 // BLOCK_BYTES
    }


@pytest.mark.parametrize("free_bytes", [0, 1, 2 * LONGEST_BYTES - 2])
def test_error_of_a_host_without_room_names_a_remedy(free_bytes):
    with pytest.raises(KVCacheTooSmallError, match="cpu_kv_cache_bytes is not set: at most 0.5"):
        plan(CacheConfig(), HostMemory(free_bytes=free_bytes))
    fits = plan(CacheConfig(), HostMemory(free_bytes=2 * LONGEST_BYTES))
    assert fits.num_longest_reqs == 1


def test_cpu_kv_cache_bytes_applies_whatever_is_free():
    result = plan(CacheConfig(cpu_kv_cache_bytes=BLOCK_BYTES * 30), HostMemory(free_bytes=0))
    assert result.pool_bytes == 30 * BLOCK_BYTES


def test_engines_of_one_host_share_what_all_their_weights_leave():
    memory = HostMemory.of_engines(1000, num_engines=3, weight_bytes=200)
    assert memory.free_bytes == 200
    assert HostMemory.of_engines(1000, num_engines=1, weight_bytes=200).free_bytes == 1000
    assert HostMemory.of_engines(100, num_engines=3, weight_bytes=200).free_bytes == 0


def test_accelerator_gets_what_weights_and_activations_leave():
    memory = device_memory(
        BLOCK_BYTES * 100, used_bytes=BLOCK_BYTES * 20, activation_bytes=BLOCK_BYTES * 10
    )
    result = plan(CacheConfig(gpu_memory_utilization=0.5), memory)
    assert result.kv_cache_config.num_blocks == 20


def test_a_little_more_or_less_free_memory_is_the_same_number_of_blocks():
    def num_blocks(free_blocks: int) -> int:
        memory = device_memory(
            BLOCK_BYTES * 100_000, activation_bytes=BLOCK_BYTES * (80_000 - free_blocks)
        )
        return plan(CacheConfig(gpu_memory_utilization=0.8), memory).kv_cache_config.num_blocks

    assert num_blocks(60_000) == num_blocks(60_100) == num_blocks(59_950) == 59_904
    assert num_blocks(119) == 119


def test_accelerator_never_plans_with_more_than_jax_may_take():
    memory = device_memory(BLOCK_BYTES * 200, limit_bytes=BLOCK_BYTES * 100)
    result = plan(CacheConfig(gpu_memory_utilization=0.9), memory)
    assert result.kv_cache_config.num_blocks == 98  # 2 % stay free


def test_huge_memory_stops_at_slots_that_int32_counts():
    memory = device_memory(2**50)
    num_blocks = plan(CacheConfig(), memory).kv_cache_config.num_blocks
    assert 2**31 - 200 < 2 * 4 * num_blocks * 16 < 2**31


def test_report_says_tokens_and_longest_requests():
    # 100 tokens are 7 blocks; one of the 29 blocks is the null block.
    result = plan(CacheConfig(num_gpu_blocks_override=29))
    assert result.num_longest_reqs == 4
    assert result.num_tokens == 28 * 16
    report = result.report()
    for part in ("29 blocks of 16", "1024 bytes per token", "448 tokens", "4 requests of 100"):
        assert part in report
    assert report.endswith("; room for a max_model_len of up to 448") and "groups" not in report


def test_largest_max_model_len_is_not_limited_by_that_of_the_plan():
    config = CacheConfig(num_gpu_blocks_override=301)
    result = plan(config, max_model_len=100, groups=HYBRID)
    # Five sliding groups hold 7 blocks each.
    assert result.largest_max_model_len == (300 - 5 * 7) * 16
    for num_tokens, num_fitting in ((265 * 16, 1), (265 * 16 + 1, 0)):
        assert plan(config, None, num_tokens, HYBRID).num_longest_reqs == num_fitting
    of_windows = plan(config, groups=make_groups([20, 20]))
    assert of_windows.largest_max_model_len is None
    assert "room for" not in of_windows.report()


@pytest.mark.parametrize("windows", [[None] * 4, [20, None], [20, 20]])
@pytest.mark.parametrize("num_blocks", [2, 3, 7, 8, 11, 15])
def test_longest_request_that_fits_is_reported(windows, num_blocks):
    groups = make_groups(windows)
    config = CacheConfig(num_gpu_blocks_override=num_blocks)
    result = plan(config, groups=groups)
    fitting = [n for n in range(1, 101) if plan(config, None, n, groups).num_longest_reqs > 0]
    assert result.max_fitting_len == max(fitting, default=0)
    cpu_config = CacheConfig(cpu_kv_cache_bytes=num_blocks * result.block_bytes)
    if result.max_fitting_len < 100:
        with pytest.raises(KVCacheTooSmallError) as error:
            plan(cpu_config, groups=groups)
        assert error.value.max_fitting_len == result.max_fitting_len


@pytest.mark.parametrize(
    ("cache_config", "memory", "remedy"),
    [
        (CacheConfig(cpu_kv_cache_bytes=7 * BLOCK_BYTES), None, "cpu_kv_cache_bytes"),
        (
            CacheConfig(),
            device_memory(2**20, used_bytes=2**21),
            "gpu_memory_utilization",
        ),
    ],
)
def test_pool_too_small_for_one_request_says_got_wanted_and_remedy(cache_config, memory, remedy):
    with pytest.raises(KVCacheTooSmallError) as raised:
        plan(cache_config, memory)
    message = str(raised.value)
    assert "got 7 blocks" in message or "got 0 blocks" in message
    assert "at least 8 blocks" in message
    assert "smaller max_model_len" in message and remedy in message
    # One more block would do.
    assert plan(CacheConfig(cpu_kv_cache_bytes=8 * BLOCK_BYTES)).num_longest_reqs == 1


def test_error_names_the_size_that_several_devices_need_together():
    config = CacheConfig(cpu_kv_cache_bytes=4 * MIB)
    with pytest.raises(KVCacheTooSmallError, match="got 64 blocks .* 65 blocks, or 4.1 MiB"):
        plan(config, max_model_len=1_024, num_devices=4)
    enough = CacheConfig(cpu_kv_cache_bytes=int(4.1 * MIB))
    assert plan(enough, max_model_len=1_024, num_devices=4).num_longest_reqs == 1


def test_override_too_small_for_the_longest_request_is_accepted():
    result = plan(CacheConfig(num_gpu_blocks_override=7))
    assert (result.kv_cache_config.num_blocks, result.num_longest_reqs) == (7, 0)


# Ten sliding and two full layers: groups of two, five sliding ones and a full one. A block of the
# pool is two pages of 4,096 bytes. Of 1,024 tokens a sliding group holds at most 63 + 32 tokens:
# 6 blocks, and one more because a window need not begin where a block does.
HYBRID = make_groups(([64] * 5 + [None]) * 2)
NUM_BLOCKS_OF_LONGEST_HYBRID = 5 * 7 + 64


def test_sliding_groups_need_their_window_and_one_step():
    too_few = CacheConfig(cpu_kv_cache_bytes=NUM_BLOCKS_OF_LONGEST_HYBRID * 8192)
    with pytest.raises(ConfigError, match="got 99 blocks .* at least 100 blocks"):
        plan(too_few, max_model_len=1024, groups=HYBRID)
    enough = CacheConfig(cpu_kv_cache_bytes=(NUM_BLOCKS_OF_LONGEST_HYBRID + 1) * 8192)
    result = plan(enough, max_model_len=1024, groups=HYBRID)
    assert result.kv_cache_config.num_blocks == 100
    assert (result.block_bytes, result.num_longest_reqs) == (8192, 1)


def test_report_of_several_groups_says_what_a_late_token_costs():
    result = plan(CacheConfig(num_gpu_blocks_override=301), max_model_len=1024, groups=HYBRID)
    # A block of each of six groups per 16 tokens; past the window only the full group grows.
    assert (result.token_bytes, result.late_token_bytes) == (6 * 512, 512)
    assert result.num_tokens == 300 * 16 // 6
    assert result.num_longest_reqs == 300 // NUM_BLOCKS_OF_LONGEST_HYBRID
    report = result.report()
    for part in (
        "301 blocks of 16 tokens in 6 groups",
        "3072 bytes per token, 512 past the window of a long sequence",
        "800 tokens",
        "3 requests of 1024",
    ):
        assert part in report


def heads(num_kv_heads, head_dim):
    return AttentionFormat(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16")


def test_report_shows_the_share_of_padding():
    # The windowless layers fill pages of 4,096 bytes. Cache a has 3,072 bytes per block of 16
    # tokens, so a quarter of its page is padding. Caches b and c have 1,280 bytes per block of 16,
    # get blocks of 32, and leave three eighths of their pages empty.
    groups = make_groups([None] * 2, a=heads(2, 24), b=heads(1, 20), c=heads(1, 20))
    assert groups.padded_shares == {"a.kv": 0.25, "b.kv": 0.375, "c.kv": 0.375}
    report = plan(CacheConfig(num_gpu_blocks_override=20), groups=groups).report()
    assert report.endswith(
        "; padding: 25.0% of the pages of 1 cache, 37.5% of the pages of 2 caches"
    )
    assert "blocks of 16 or 32 tokens in " in report
    assert "padding" not in plan(CacheConfig(num_gpu_blocks_override=20)).report()
    measured = plan(CacheConfig(cpu_kv_cache_bytes=2**20), groups=groups)
    assert "padding: 25.0%" in measured.report()


def test_int32_slots_count_the_longest_blocks():
    """Of a group whose pages hold twice the tokens."""
    groups = make_groups([None], a=heads(1, 32))
    num_blocks = plan(CacheConfig(), device_memory(2**50), groups=groups).kv_cache_config.num_blocks
    assert 2**31 - 200 < 2 * num_blocks * 32 < 2**31


def test_int32_slots_count_the_tokens_of_one_context_rank():
    groups = make_groups([None], num_ranks=4)
    num_blocks = plan(CacheConfig(), device_memory(2**50), groups=groups).kv_cache_config.num_blocks
    assert 2**31 - 200 < 2 * num_blocks * 16 < 2**31


def test_int32_slots_count_all_rows_of_the_largest_group():
    memory = device_memory(2**50)
    num_blocks = plan(CacheConfig(), memory, groups=HYBRID).kv_cache_config.num_blocks
    assert 2**31 - 200 < 2 * 2 * num_blocks * 16 < 2**31


def test_device_memory_counts_whatever_is_in_use(monkeypatch):
    def measure(stats, platform):
        device = types.SimpleNamespace(memory_stats=lambda: stats)
        return measure_device_memory(
            [device], platform, weight_bytes=4000, planned_bytes=300, activation_bytes=7
        )

    monkeypatch.setenv(SHARE_VARIABLE, "0.5")
    stats = {"bytes_limit": 10**6, "bytes_in_use": 5000}
    # JAX was given half of the GPU.
    assert measure(stats, GPU()) == DeviceMemory(
        total_bytes=2 * 10**6, limit_bytes=10**6, used_bytes=5300, activation_bytes=7
    )
    assert measure(stats, TPU()).total_bytes == 10**6
    assert measure({"bytes_limit": 10**6}, GPU()).used_bytes == 4300
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        measure(None, GPU())


def test_memory_of_the_process_is_reported_by_parts():
    mib = 2**20
    line = report_memory(3000 * mib, 2400 * mib, 1024 * mib)
    for part in ("3000.0 MiB in use", "2400.0 MiB of it weights", "600.0 MiB programs", "1024.0"):
        assert part in line
