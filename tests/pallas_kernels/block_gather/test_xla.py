"""Tests of `block_gather/xla.py` against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_gather.cases import CASES, build_inputs
from pallas_kernels.block_gather.reference import block_gather_reference
from pallas_kernels.block_gather.xla import block_gather_xla
from tests.quick_compile import quick_jit

JITTED = quick_jit(block_gather_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.k_cache, inputs.v_cache, inputs.block_ids
    got = run_jitted(block_gather_xla, *arguments)
    wanted = run_jitted(block_gather_reference, *arguments)
    for got_blocks, wanted_blocks in zip(got, wanted, strict=True):
        assert got_blocks.dtype == wanted_blocks.dtype
        np.testing.assert_array_equal(np.asarray(got_blocks), np.asarray(wanted_blocks))


@settings(max_examples=100)
@given(st.lists(st.one_of(st.integers(0, 4), st.integers(5, 2**31 - 1)), min_size=4, max_size=4))
def test_any_ids_equal_numpy(block_ids):
    cache = 1 + np.arange(30, dtype=np.float32).reshape(3, 5, 1, 2, 1)
    ids = np.array(block_ids, np.int32)
    expected = np.zeros((3, 4, 1, 2, 1), np.float32)
    expected[:, ids < 5] = cache[:, ids[ids < 5]]
    k_blocks, v_blocks = JITTED(cache, -cache, ids)
    np.testing.assert_array_equal(k_blocks, expected)
    np.testing.assert_array_equal(v_blocks, -expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_the_caches_are_not_copied(dtype):
    cache = jax.ShapeDtypeStruct((4, 1024, 2, 16, 32), dtype)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = JITTED.lower(cache, cache, ids).compile().memory_analysis()
    cache_bytes = cache.dtype.itemsize * int(np.prod(cache.shape))
    assert memory.temp_size_in_bytes < cache_bytes // 50  # 8 of 1,024 blocks are 1/128
