"""The KV cache's arrays have the contract's shape, zeros, a named sharding, and countable slots."""

import jax
import numpy as np
import pytest

from models.platforms import CPU, GPU
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError
from paxkv.runner.memory.kv_cache_arrays import (
    abstract_kv_cache,
    allocate_kv_cache,
    device_mesh,
    kv_cache_dtype,
)

ON_CPU = CPU(num_threads=1, instruction_sets=frozenset())


def make_config(num_blocks=6, layers=("a", "b", "c"), head_sizes=(16,)):
    groups = tuple(
        KVCacheGroupSpec(
            layer_names=layers,
            kv_cache_spec=FullAttentionSpec(
                block_size=8, num_kv_heads=2, head_size=head_size, dtype="float32"
            ),
        )
        for head_size in head_sizes
    )
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups)


def test_arrays_are_zeros_of_the_contracts_shape_over_a_named_mesh():
    kv_cache = allocate_kv_cache(make_config(), device_mesh(jax.devices()[0]))
    for array in (kv_cache.k, kv_cache.v):
        assert array.shape == (3, 6, 2, 8, 16)
        assert array.dtype == np.float32
        assert array.sharding.spec[2] == "model"
        assert not np.asarray(array).any()
    assert kv_cache.k.unsafe_buffer_pointer() != kv_cache.v.unsafe_buffer_pointer()


def test_more_slots_than_int32_counts_is_a_config_error():
    with pytest.raises(ConfigError, match="too many slots"):
        abstract_kv_cache(make_config(num_blocks=2**26), device_mesh(jax.devices()[0]))


def test_cache_that_no_memory_is_there_for_is_a_config_error():
    # 2**24 slots of 2**25 values: petabytes.
    config = make_config(num_blocks=2**19, head_sizes=(2**23,))
    with pytest.raises(ConfigError, match="no memory for a KV cache of .*smaller cpu_kv_cache_b"):
        allocate_kv_cache(config, device_mesh(jax.devices()[0]))


def test_groups_share_one_pair_of_arrays_as_tall_as_the_largest():
    full = make_config().kv_cache_groups[0]
    sliding = SlidingWindowSpec(
        block_size=8, num_kv_heads=2, head_size=16, dtype="float32", sliding_window=9
    )
    groups = (full, KVCacheGroupSpec(layer_names=("d", "e"), kv_cache_spec=sliding))
    config = KVCacheConfig(num_blocks=6, kv_cache_groups=groups)
    kv_cache = abstract_kv_cache(config, device_mesh(jax.devices()[0]))
    assert kv_cache.k.shape == kv_cache.v.shape == (3, 6, 2, 8, 16)


def test_v_heads_may_be_of_another_size():
    spec = FullAttentionSpec(
        block_size=8, num_kv_heads=2, head_size=16, head_size_v=4, dtype="float32"
    )
    group = KVCacheGroupSpec(layer_names=("a",), kv_cache_spec=spec)
    config = KVCacheConfig(num_blocks=6, kv_cache_groups=(group,))
    kv_cache = abstract_kv_cache(config, device_mesh(jax.devices()[0]))
    assert (kv_cache.k.shape[-1], kv_cache.v.shape[-1]) == (16, 4)


def test_groups_with_different_pages_cannot_be_computed_with():
    with pytest.raises(ConfigError, match=r"one format .*\(8, 2, 16, .*\(8, 2, 32, "):
        abstract_kv_cache(make_config(head_sizes=(16, 32)), device_mesh(jax.devices()[0]))


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float32"),
        MambaSpec(block_size=8, shapes=((4,),), dtypes=("float32",)),
        FullAttentionSpec(
            block_size=8, num_kv_heads=2, head_size=16, dtype="float32", page_size_padded=8192
        ),
    ],
)
def test_kinds_without_k_and_v_of_their_own_cannot_be_computed_with(spec):
    group = KVCacheGroupSpec(layer_names=("layer.3",), kv_cache_spec=spec)
    with pytest.raises(ConfigError, match=r"layers \['layer.3'\] .* cannot be computed"):
        abstract_kv_cache(
            KVCacheConfig(num_blocks=6, kv_cache_groups=(group,)), device_mesh(jax.devices()[0])
        )


def test_half_precision_is_stored_as_float32_on_the_cpu_only():
    assert kv_cache_dtype("bfloat16", ON_CPU) == "float32"
    assert kv_cache_dtype("float16", ON_CPU) == "float32"
    assert kv_cache_dtype("bfloat16", GPU()) == "bfloat16"


def test_keys_and_values_are_kept_in_what_is_asked_for_where_that_can_be():
    assert kv_cache_dtype("float32", ON_CPU, "float16") == "float16"
    assert kv_cache_dtype("bfloat16", ON_CPU, "float32") == "float32"
    assert kv_cache_dtype("bfloat16", GPU(), "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match=r"'bfloat16'; on cpu .* in float32 or float16"):
        kv_cache_dtype("bfloat16", ON_CPU, "bfloat16")
    with pytest.raises(ConfigError, match=r"'float16'; on gpu a model in bfloat16 .* in bfloat16"):
        kv_cache_dtype("bfloat16", GPU(), "float16")
