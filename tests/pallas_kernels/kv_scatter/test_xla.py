"""Tests of `kv_scatter/xla.py` against the reference, and of what it must not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.kv_scatter.xla import kv_scatter_xla


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    # The row is traced here.
    arguments = (inputs.k_cache, inputs.v_cache, inputs.k, inputs.v, inputs.slots, inputs.row)
    got = run_jitted(kv_scatter_xla, *arguments)
    wanted = run_jitted(kv_scatter_reference, *arguments)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_padding_writes_nowhere(row):
    # Past one row would be the next row, and a negative index would be the last element.
    cache = jnp.zeros((3, 4, 2, 8, 16))
    padding = pad_slot(3, 4, 8)
    slots = jnp.array([padding, padding + 1, 2 * padding, jnp.iinfo(jnp.int32).max], jnp.int32)
    token = jnp.ones((4, 2, 16))
    k_cache, v_cache = kv_scatter_xla(cache, cache, token, token, slots, row)
    assert not k_cache.any()
    assert not v_cache.any()


def test_values_are_cast_to_the_dtype_of_the_cache():
    cache = jnp.zeros((1, 2, 1, 8, 4), jnp.float16)
    token = jnp.full((1, 1, 4), 1.5, jnp.float32)
    slots = jnp.array([9], jnp.int32)
    k_cache, _ = kv_scatter_xla(cache, cache, token, token, slots, 0)
    assert k_cache.dtype == jnp.float16
    assert k_cache[0, 1, 0, 1].tolist() == [1.5] * 4


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_donated_caches_are_not_copied(num_tokens):
    cache = jax.ShapeDtypeStruct((4, 1024, 2, 16, 32), jnp.float32)
    token = jax.ShapeDtypeStruct((num_tokens, 2, 32), jnp.float32)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    donated = jax.jit(kv_scatter_xla, donate_argnums=(0, 1))
    memory = donated.lower(cache, cache, token, token, slots, row).compile().memory_analysis()
    cache_bytes = 4 * int(np.prod(cache.shape))
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 100
