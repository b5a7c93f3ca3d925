"""Tests of `block_copy/xla.py` against NumPy, and that donated pages are not copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_copy.cases import CASES, build_inputs
from pallas_kernels.block_copy.xla import block_copy_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.block_copy.test_reference import copy_in_numpy
from tests.quick_compile import marked_sizes, quick_jit

NUM_ROWS, NUM_BLOCKS, NUM_COPIES = 2, 6, 5
JITTED = quick_jit(block_copy_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    ids = (inputs.source_block_ids, inputs.target_block_ids)
    got = run_jitted(block_copy_xla, inputs.pages, *ids)
    assert got.dtype == inputs.pages.dtype
    np.testing.assert_array_equal(np.asarray(got), copy_in_numpy(inputs.pages, *ids))


@st.composite
def draw_copies(draw):
    """Sources and distinct targets, some of them past the end, in one fixed shape."""
    block = st.integers(0, NUM_BLOCKS - 1)
    targets = draw(
        st.lists(
            st.integers(0, 2 * NUM_BLOCKS), min_size=NUM_COPIES, max_size=NUM_COPIES, unique=True
        )
    )
    sources = [draw(block) if target < NUM_BLOCKS else NUM_BLOCKS for target in targets]
    return np.array(sources, np.int32), np.array(targets, np.int32)


@settings(max_examples=30)  # most of them would show a wrong block
@given(draw_copies())
def test_any_copies_equal_numpy_that_reads_first(copies):
    sources, targets = copies
    pages = np.arange(NUM_ROWS * NUM_BLOCKS * 2, dtype=np.float32)
    pages = pages.reshape(NUM_ROWS, NUM_BLOCKS, 2)
    is_real = targets < NUM_BLOCKS
    expected = pages.copy()
    expected[:, targets[is_real]] = pages[:, sources[is_real]]
    np.testing.assert_array_equal(JITTED(pages, sources, targets), expected)


# With four rows, the normal run has each pair of values among the number of copies, the layout and
# the dtype. One row has one case.
@pytest.mark.parametrize(
    "sizes",
    marked_sizes(
        [
            (1, 1, (1024,), "float32"),
            (4, 1, (1, 16, 64), "float32"),
            (4, 1, (1024,), "uint16"),
            (4, 8, (1024,), "float32"),
            (4, 8, (1, 16, 64), "uint16"),
        ],
        slow=[
            (1, 1, (1024,), "uint16"),
            (1, 1, (1, 16, 64), "float32"),
            (1, 1, (1, 16, 64), "uint16"),
            (4, 1, (1024,), "float32"),
            (4, 1, (1, 16, 64), "uint16"),
            (4, 8, (1024,), "uint16"),
            (4, 8, (1, 16, 64), "float32"),
        ],
    ),
    ids=str,
)
def test_donated_pages_are_not_copied(sizes):
    num_rows, num_copies, block_dims, dtype = sizes
    pages = jax.ShapeDtypeStruct((num_rows, 1024, *block_dims), dtype)
    ids = jax.ShapeDtypeStruct((num_copies,), jnp.int32)
    donated = jax.jit(block_copy_xla, donate_argnums=0)
    compiled = donated.lower(pages, ids, ids).compile(AS_FOR_USERS)
    memory = compiled.memory_analysis()
    page_bytes = 1024 * pages.dtype.itemsize
    assert memory.alias_size_in_bytes >= num_rows * 1024 * page_bytes
    # What is read waits for its writing: a page a copy, of one row.
    assert memory.temp_size_in_bytes <= num_copies * page_bytes + 4096
    text = compiled.as_text()
    # A select between old pages and new ones needs no memory, but reads all of them.
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|select)\(", text)
    sizes = [np.prod([int(dim) for dim in dims.split(",")]) for dims in found]
    assert all(size < 1024 * 1024 for size in sizes)
    assert "input_output_alias" in text
