"""Tests of `block_scatter/xla.py` against the reference, and that donated caches are not copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_scatter.cases import CASES, build_inputs
from pallas_kernels.block_scatter.reference import block_scatter_reference
from pallas_kernels.block_scatter.xla import block_scatter_xla
from tests.quick_compile import quick_jit

JITTED = quick_jit(block_scatter_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    caches, blocks = (inputs.k_cache, inputs.v_cache), (inputs.k_blocks, inputs.v_blocks)
    arguments = (*caches, *blocks, inputs.block_ids)
    got = run_jitted(block_scatter_xla, *arguments)
    wanted = run_jitted(block_scatter_reference, *arguments)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        assert got_cache.dtype == wanted_cache.dtype
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(st.integers(0, 4), st.integers(5, 2**31 - 1)),
        min_size=4,
        max_size=4,
        unique=True,
    )
)
def test_any_ids_equal_numpy(block_ids):
    # Past the end of one row would be the next row.
    cache = np.zeros((3, 5, 1, 2, 1), np.float32)
    blocks = 1 + np.arange(24, dtype=np.float32).reshape(3, 4, 1, 2, 1)
    ids = np.array(block_ids, np.int32)
    expected = cache.copy()
    expected[:, ids[ids < 5]] = blocks[:, ids < 5]
    k_cache, v_cache = JITTED(cache, cache, blocks, -blocks, ids)
    np.testing.assert_array_equal(k_cache, expected)
    np.testing.assert_array_equal(v_cache, -expected)


# Of float8_e4m3fn, and on JAX 0.10.2 of bfloat16, XLA:CPU copies the whole cache.
@pytest.mark.parametrize(
    ("num_kv_heads", "num_rows", "num_ids", "dtype"),
    [
        (1, 1, 1, "float32"),
        (1, 4, 8, "float16"),
        (2, 4, 1, "float16"),
        (2, 4, 8, "int8"),
        (2, 1, 1, "int8"),
    ],
)
def test_donated_caches_are_not_copied(num_kv_heads, num_rows, num_ids, dtype):
    cache = jax.ShapeDtypeStruct((num_rows, 1024, num_kv_heads, 16, 32), dtype)
    blocks = jax.ShapeDtypeStruct((num_rows, num_ids, num_kv_heads, 16, 32), dtype)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    donated = jax.jit(block_scatter_xla, donate_argnums=(0, 1))
    compiled = donated.lower(cache, cache, blocks, blocks, ids).compile()
    memory = compiled.memory_analysis()
    cache_bytes = cache.dtype.itemsize * int(np.prod(cache.shape))
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 20  # 8 of 1,024 blocks are 1/128
