"""The settings decide in which dtypes states are stored; `auto` is what the checkpoint says."""

import pytest

from models.cache.state_format import StateFormat
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec
from models.platforms import default_platform
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import ConfigError
from paxkv.runner.memory.state_dtypes import with_state_dtypes
from paxkv.runner.runner_plan import RunnerPlan
from tests.models.config.test_state_layers import as_read, make_hf_config


def dtypes_of(*, checkpoint="float32", batch_invariant=False, **settings):
    """The dtypes of windows and of states."""
    cache = StateFormat(shapes=((3, 8), (2, 4)), num_windows=1, state_dtype=checkpoint)
    layer = LayerSpec(name="0", caches=(("mamba", CacheRef(format=cache)),))
    spec = with_state_dtypes(
        DecoderSpec(layers=(layer,)), CacheConfig(**settings), batch_invariant=batch_invariant
    )
    (found,) = spec.own_formats.values()
    return found.window_dtype, found.state_dtype


def test_auto_is_what_the_checkpoint_says():
    assert dtypes_of() == ("float32", "float32")
    assert dtypes_of(checkpoint="bfloat16") == ("float32", "bfloat16")


def test_states_have_the_dtype_of_windows_unless_they_have_one_of_their_own():
    assert dtypes_of(mamba_cache_dtype="bfloat16") == ("bfloat16", "bfloat16")
    assert dtypes_of(mamba_cache_dtype="float32", checkpoint="float16") == ("float32", "float32")
    settings = {"mamba_cache_dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    assert dtypes_of(**settings) == ("bfloat16", "float32")
    assert dtypes_of(mamba_ssm_cache_dtype="float16") == ("float32", "float16")


def test_batch_invariance_needs_float32():
    assert dtypes_of(batch_invariant=True) == ("float32", "float32")
    with pytest.raises(ConfigError, match="batch_invariant needs states in float32"):
        dtypes_of(batch_invariant=True, mamba_ssm_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="got bfloat16, float32"):
        dtypes_of(batch_invariant=True, checkpoint="bfloat16")


def test_plan_has_half_of_the_bytes_of_states_with_16_bits():
    def state_bytes(**settings):
        plan = RunnerPlan(
            model_config=as_read(make_hf_config("MambaForCausalLM")),
            dtype="float32",
            platform=default_platform(),
            cache_config=CacheConfig(**settings),
            scheduler_config=SchedulerConfig(),
            runner_config=RunnerConfig(),
            max_model_len=64,
        )
        return plan.groups.kv_cache_groups[0].kv_cache_spec.state_bytes

    assert state_bytes(mamba_cache_dtype="bfloat16") * 2 == state_bytes()
    assert state_bytes() / 2 < state_bytes(mamba_ssm_cache_dtype="float16") < state_bytes()
