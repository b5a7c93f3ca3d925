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
from tests.compiler_flags import AS_FOR_USERS
from tests.quick_compile import quick_jit

JITTED = quick_jit(block_gather_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(block_gather_xla, inputs.pages, inputs.block_ids)
    wanted = run_jitted(block_gather_reference, inputs.pages, inputs.block_ids)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@settings(max_examples=100)
@given(st.lists(st.one_of(st.integers(0, 4), st.integers(5, 2**31 - 1)), min_size=4, max_size=4))
def test_any_ids_equal_numpy(block_ids):
    pages = 1 + np.arange(30, dtype=np.float32).reshape(3, 5, 2)
    ids = np.array(block_ids, np.int32)
    expected = np.zeros((3, 4, 2), np.float32)
    expected[:, ids < 5] = pages[:, ids[ids < 5]]
    np.testing.assert_array_equal(JITTED(pages, ids), expected)


@pytest.mark.parametrize("num_ids", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int8", "float8_e4m3fn"])
def test_the_pages_are_not_copied(dtype, num_ids):
    pages = jax.ShapeDtypeStruct((4, 1024, 1024), dtype)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    memory = jax.jit(block_gather_xla).lower(pages, ids).compile(AS_FOR_USERS).memory_analysis()
    pages_bytes = pages.dtype.itemsize * int(np.prod(pages.shape))
    assert memory.temp_size_in_bytes < pages_bytes // 50  # 8 of 1,024 blocks are 1/128
