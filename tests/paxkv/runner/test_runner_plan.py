"""The plan of a runner: each part follows from those before it, and no device is needed."""

import dataclasses

import pytest

from models.platforms import GPU, default_platform
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import KVCacheTooSmallError
from paxkv.runner.memory.memory_plan import DeviceMemory, HostMemory
from paxkv.runner.runner_plan import RunnerPlan
from tests.paxkv.runner.tiny_model import NUM_HEADS, tiny_config

CPU = default_platform()
# A full layer and one with a window: two groups.
CONFIG = tiny_config((None, 6), (NUM_HEADS, NUM_HEADS))


def make_plan(**changes):
    plan = RunnerPlan(
        model_config=CONFIG,
        dtype="float32",
        platform=CPU,
        cache_config=CacheConfig(block_size=8),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        runner_config=RunnerConfig(),
        max_model_len=100,
    )
    return dataclasses.replace(plan, **changes)


def test_places_tables_and_buckets_follow_from_the_spec():
    plan = make_plan()
    assert [group.layer_names for group in plan.groups.kv_cache_groups] == [
        ("model.layers.0.self_attn",),
        ("model.layers.1.self_attn",),
    ]
    assert [dict(places)["self_attn"].group_idx for places in plan.places] == [0, 1]
    (table,) = plan.tables
    assert (table.num_groups, table.max_blocks_per_req, table.block_size) == (2, 13, 8)
    assert plan.buckets.tables == plan.tables
    assert plan.buckets.step_shapes[-1].num_tokens == 32
    assert plan.buckets.row_shape.max_model_len == 100


def test_the_platform_decides_the_block_size_and_how_programs_are_shared():
    config = CacheConfig()
    cpu, gpu = make_plan(cache_config=config), make_plan(cache_config=config, platform=GPU())
    assert cpu.tables[0].block_size == CPU.block_size
    assert gpu.tables[0].block_size == GPU().block_size
    assert any(shape.widths for shape in cpu.buckets.step_shapes) == CPU.shares_programs
    assert not any(shape.widths for shape in gpu.buckets.step_shapes)


def test_max_model_len_that_fits_is_kept():
    plan = make_plan(may_be_shorter=True)
    fitted, memory_plan = plan.fit(HostMemory(free_bytes=2**30))
    assert fitted is plan
    assert memory_plan.max_model_len == 100


BLOCK_BYTES = make_plan().fit(HostMemory(free_bytes=2**30))[1].block_bytes


@pytest.mark.parametrize(
    ("cache_config", "memory"),
    [
        (CacheConfig(block_size=8, num_gpu_blocks_override=10), None),
        (CacheConfig(block_size=8, cpu_kv_cache_bytes=10 * BLOCK_BYTES), None),
        (CacheConfig(block_size=8), HostMemory(free_bytes=32 * BLOCK_BYTES)),
        (
            CacheConfig(block_size=8, gpu_memory_utilization=1.0),
            DeviceMemory(
                total_bytes=11 * BLOCK_BYTES,
                limit_bytes=11 * BLOCK_BYTES,
                used_bytes=0,
                activation_bytes=0,
            ),
        ),
    ],
    ids=["blocks", "bytes", "host", "device"],
)
def test_max_model_len_is_reduced_to_the_longest_that_fits(cache_config, memory):
    plan = make_plan(cache_config=cache_config, may_be_shorter=True)
    fitted, memory_plan = plan.fit(memory)
    length = fitted.max_model_len
    assert 2 <= length < 100
    assert memory_plan.max_model_len == memory_plan.max_fitting_len == length
    assert fitted.buckets.row_shape.max_model_len == length
    assert fitted.tables[0].max_blocks_per_req == -(-length // 8)
    # One token more, given as the length, has no room.
    longer = dataclasses.replace(plan, max_model_len=length + 1, may_be_shorter=False)
    if cache_config.num_gpu_blocks_override is None:
        with pytest.raises(KVCacheTooSmallError, match=f"max_model_len={length + 1}"):
            longer.fit(memory)
    else:
        assert longer.fit(memory)[1].max_fitting_len == length


@pytest.mark.parametrize(
    ("cache_config", "message"),
    [
        # Two groups, and one block besides the null block.
        (
            CacheConfig(block_size=8, num_gpu_blocks_override=2),
            "got 2 blocks, which hold 0 tokens .* num_gpu_blocks_override",
        ),
        (CacheConfig(block_size=8, cpu_kv_cache_bytes=2 * BLOCK_BYTES), "cpu_kv_cache_bytes"),
    ],
)
def test_no_room_for_two_tokens_is_an_error(cache_config, message):
    with pytest.raises(KVCacheTooSmallError, match=message):
        make_plan(cache_config=cache_config, may_be_shorter=True).fit(None)
