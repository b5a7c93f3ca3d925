"""Features that have no effect for a model, a device or a setting, and the reasons."""

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY, ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.engine.feature_use import find_feature_uses
from tests.paxkv.kv_cache.cache_fakes import cross, full, make_config, states, window


def uses(*specs, config=None, max_model_len=64, num_positions=64, why=None, ops=()):
    found = find_feature_uses(
        config or EngineConfig(),
        make_config(*(specs or (full(),))),
        max_model_len=max_model_len,
        num_positions=num_positions,
        why_no_kernels=why,
        ops_without_kernels=ops,
    )
    return {use.name: (use.is_used, use.detail) for use in found}


def test_by_default_every_feature_except_batch_invariance_is_used():
    found = uses()
    assert {name for name, (is_used, _) in found.items() if not is_used} == {"batch_invariance"}
    assert list(found) == ["prefix_cache", "bursts", "batch_invariance", "kernels", "full_context"]


@pytest.mark.parametrize(
    ("specs", "max_model_len", "is_used", "words"),
    [
        ((full(4), window(8, 16)), 64, True, "multiples of 16 tokens"),
        ((full(4), window(8, 6)), 64, True, "multiples of 12 tokens"),
        # A prompt of 17 tokens: 16 of them in a block, and one that is always computed.
        ((full(16),), 18, True, "multiples of 16 tokens"),
        ((full(16),), 17, False, "no prompt is longer than that with max_model_len=17"),
        ((full(), cross()), 64, False, "cross-attention"),
        ((full(), states()), 64, True, "multiples of 4 tokens"),
    ],
)
def test_prefixes_are_shared_in_multiples_of_all_block_sizes(specs, max_model_len, is_used, words):
    found = uses(*specs, max_model_len=max_model_len)["prefix_cache"]
    assert found[0] is is_used and words in found[1]


def test_disabled_prefix_cache_names_its_flag():
    config = EngineConfig(cache=CacheConfig(enable_prefix_caching=False))
    assert uses(config=config)["prefix_cache"] == (False, "--no-enable-prefix-caching is set.")


def test_bursts_name_the_setting_that_disables_them():
    assert uses(config=EngineConfig(scheduler=SchedulerConfig(max_decode_burst=4)))["bursts"] == (
        True,
        "up to 4 decode steps, as many as the device computes in 0.2 s, or in 0.05 s while a "
        "client streams.",
    )
    single = EngineConfig(scheduler=SchedulerConfig(max_decode_burst=1))
    assert uses(config=single)["bursts"] == (False, "--max-decode-burst is 1.")
    found = uses(config=EngineConfig(runner=RunnerConfig(batch_invariant=True)))
    assert not found["bursts"][0] and "--batch-invariant" in found["bursts"][1]
    assert found["batch_invariance"][0]


def test_kernels_give_the_reason_for_plain_xla():
    assert uses(why="the device has none.")["kernels"] == (
        False,
        "plain XLA runs: the device has none.",
    )
    is_used, detail = uses(ops=("a runs as plain XLA: b.", "c runs as plain XLA: d."))["kernels"]
    assert is_used
    assert detail.endswith("except: a runs as plain XLA: b. c runs as plain XLA: d.")


@pytest.mark.parametrize(
    ("asked", "compiled_dir", "words"),
    [
        (32, None, "max_model_len is 32 of the checkpoint's 64 positions, as --max-model-len sets"),
        (None, None, "because the KV cache has no room for a longer request"),
        (FIT_MEMORY, None, "because the KV cache has no room for a longer request"),
        (None, "programs", "which the programs in --compiled-dir were compiled for"),
    ],
)
def test_context_shorter_than_the_checkpoint_allows_has_a_reason(asked, compiled_dir, words):
    config = EngineConfig(
        model=ModelConfig(max_model_len=asked), runner=RunnerConfig(compiled_dir=compiled_dir)
    )
    is_used, detail = uses(config=config, max_model_len=32)["full_context"]
    assert not is_used and words in detail
    assert uses(config=config)["full_context"] == (
        True,
        "max_model_len is 64 of the checkpoint's 64 positions.",
    )
