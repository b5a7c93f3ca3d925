"""Tests of `block_scatter/xla.py` against NumPy, and that donated pages are not copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_scatter.cases import CASES, build_inputs
from pallas_kernels.block_scatter.xla import block_scatter_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.block_scatter.test_reference import scatter_in_numpy
from tests.quick_compile import quick_jit

JITTED = quick_jit(block_scatter_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.pages, inputs.values, inputs.block_ids
    got = run_jitted(block_scatter_xla, *arguments)
    assert got.dtype == inputs.pages.dtype
    np.testing.assert_array_equal(np.asarray(got), scatter_in_numpy(*arguments))


@settings(max_examples=30)  # most of them would show a wrong block
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
    pages = np.zeros((3, 5, 2), np.float32)
    values = 1 + np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    ids = np.array(block_ids, np.int32)
    expected = pages.copy()
    expected[:, ids[ids < 5]] = values[:, ids < 5]
    np.testing.assert_array_equal(JITTED(pages, values, ids), expected)


# Of float8_e4m3fn, and on JAX 0.10.2 of bfloat16, XLA:CPU copies the whole cache.
@pytest.mark.parametrize(
    ("block_dims", "num_rows", "num_ids", "dtype"),
    [
        ((1024,), 1, 1, "float32"),
        ((1, 16, 64), 1, 1, "uint16"),
        ((1, 16, 64), 4, 8, "float16"),
        ((1024,), 4, 1, "uint16"),
        ((2, 16, 32), 4, 8, "int8"),
        ((2, 16, 32), 1, 1, "int8"),
    ],
)
def test_donated_pages_are_not_copied(block_dims, num_rows, num_ids, dtype):
    pages = jax.ShapeDtypeStruct((num_rows, 1024, *block_dims), dtype)
    values = jax.ShapeDtypeStruct((num_rows, num_ids, *block_dims), dtype)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    donated = jax.jit(block_scatter_xla, donate_argnums=0)
    memory = donated.lower(pages, values, ids).compile(AS_FOR_USERS).memory_analysis()
    pages_bytes = pages.dtype.itemsize * int(np.prod(pages.shape))
    assert memory.alias_size_in_bytes >= pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes // 20  # 8 of 1,024 blocks are 1/128
