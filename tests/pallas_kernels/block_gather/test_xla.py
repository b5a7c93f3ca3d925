"""Tests of `block_gather/xla.py` against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_gather.cases import CASES, build_inputs
from pallas_kernels.block_gather.xla import block_gather_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.block_gather.test_reference import gather_in_numpy
from tests.quick_compile import marked_sizes, quick_jit

JITTED = quick_jit(block_gather_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(block_gather_xla, inputs.pages, inputs.block_ids)
    assert got.dtype == inputs.pages.dtype
    wanted = gather_in_numpy(inputs.pages, inputs.block_ids)
    np.testing.assert_array_equal(np.asarray(got), wanted)


@settings(max_examples=30)  # most of them would show a wrong block
@given(st.lists(st.one_of(st.integers(0, 4), st.integers(5, 2**31 - 1)), min_size=4, max_size=4))
def test_any_ids_equal_numpy(block_ids):
    pages = 1 + np.arange(30, dtype=np.float32).reshape(3, 5, 2)
    ids = np.array(block_ids, np.int32)
    expected = np.zeros((3, 4, 2), np.float32)
    expected[:, ids < 5] = pages[:, ids[ids < 5]]
    np.testing.assert_array_equal(JITTED(pages, ids), expected)


@pytest.mark.parametrize(
    "sizes",
    marked_sizes(
        [(1, "float32"), (8, "bfloat16"), (8, "uint16"), (1, "int8"), (8, "float8_e4m3fn")],
        slow=[(8, "float32"), (1, "bfloat16"), (1, "uint16"), (8, "int8"), (1, "float8_e4m3fn")],
    ),
    ids=str,
)
def test_the_pages_are_not_copied(sizes):
    num_ids, dtype = sizes
    pages = jax.ShapeDtypeStruct((4, 1024, 1024), dtype)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    memory = jax.jit(block_gather_xla).lower(pages, ids).compile(AS_FOR_USERS).memory_analysis()
    pages_bytes = pages.dtype.itemsize * int(np.prod(pages.shape))
    assert memory.temp_size_in_bytes < pages_bytes // 50  # 8 of 1,024 blocks are 1/128
