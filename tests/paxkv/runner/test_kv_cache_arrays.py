"""The KV cache's arrays have the contract's shape, zeros, a named sharding, and countable slots."""

import jax
import numpy as np
import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.kv_cache_arrays import (
    abstract_kv_cache,
    allocate_kv_cache,
    device_mesh,
    kv_cache_dtype,
)


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


def test_groups_with_different_pages_are_not_supported():
    with pytest.raises(InvariantError, match="one attention spec"):
        abstract_kv_cache(make_config(head_sizes=(16, 32)), device_mesh(jax.devices()[0]))


def test_half_precision_is_stored_as_float32_on_the_cpu_only():
    assert kv_cache_dtype("bfloat16", "cpu") == "float32"
    assert kv_cache_dtype("float16", "cpu") == "float32"
    assert kv_cache_dtype("bfloat16", "gpu") == "bfloat16"
