"""Tests of `kv_scatter/xla.py` against the reference, and of what it must not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.kv_scatter.xla import kv_scatter_xla

NUM_TOKENS = 7
JITTED = jax.jit(kv_scatter_xla)


def assert_caches_equal(got, wanted):
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        assert got_cache.dtype == wanted_cache.dtype
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    # The row is traced here.
    arguments = build_inputs(case).body_arguments
    got = run_jitted(kv_scatter_xla, *arguments)
    assert_caches_equal(got, run_jitted(kv_scatter_reference, *arguments))


@st.composite
def draw_slots(draw):
    """A cache's sizes, slots of which no two real ones are alike, and a row."""
    num_rows, num_blocks, block_size = draw(st.sampled_from([(1, 3, 8), (3, 2, 4), (2, 5, 16)]))
    num_slots = num_blocks * block_size
    padding = pad_slot(num_rows, num_blocks, block_size)
    slot = st.one_of(st.integers(0, num_slots - 1), st.integers(padding, 2**31 - 1))
    slots = draw(st.lists(slot, min_size=NUM_TOKENS, max_size=NUM_TOKENS, unique=True))
    return (num_rows, num_blocks, block_size), slots, draw(st.integers(0, num_rows - 1))


@settings(max_examples=200, deadline=None)
@given(draw_slots())
def test_any_slots_equal_numpy(drawn):
    (num_rows, num_blocks, block_size), slots, row = drawn
    cache = np.zeros((num_rows, num_blocks, 2, block_size, 3), np.float32)
    k = np.arange(1, NUM_TOKENS * 6 + 1, dtype=np.float32).reshape(NUM_TOKENS, 2, 3)
    expected = cache.copy()
    for token, slot in zip(k, slots, strict=True):
        if slot < num_blocks * block_size:
            expected[row, slot // block_size, :, slot % block_size] = token
    k_cache, v_cache = JITTED(cache, cache, k, -k, np.array(slots, np.int32), np.int32(row))
    np.testing.assert_array_equal(k_cache, expected)
    np.testing.assert_array_equal(v_cache, -expected)


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


# Of float8_e4m3fn, and on JAX 0.10.2 of bfloat16, XLA:CPU copies the whole cache.
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_donated_caches_are_not_copied(num_kv_heads, num_tokens, dtype):
    cache = jax.ShapeDtypeStruct((4, 1024, num_kv_heads, 16, 32), dtype)
    token = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, 32), dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    donated = jax.jit(kv_scatter_xla, donate_argnums=(0, 1))
    memory = donated.lower(cache, cache, token, token, slots, row).compile().memory_analysis()
    cache_bytes = cache.dtype.itemsize * int(np.prod(cache.shape))
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 100
