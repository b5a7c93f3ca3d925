"""Tests of `block_copy/xla.py` against NumPy, and that donated caches are not copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_copy.cases import CASES, build_inputs
from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.block_copy.xla import block_copy_xla
from tests.quick_compile import quick_jit

NUM_ROWS, NUM_BLOCKS, NUM_COPIES = 2, 6, 5
JITTED = quick_jit(block_copy_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    ids = (inputs.source_block_ids, inputs.target_block_ids)
    got = run_jitted(block_copy_xla, inputs.k_cache, inputs.v_cache, *ids)
    wanted = run_jitted(block_copy_reference, inputs.k_cache, inputs.v_cache, *ids)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        assert got_cache.dtype == wanted_cache.dtype
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


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


@settings(max_examples=100)
@given(draw_copies())
def test_any_copies_equal_numpy_that_reads_first(copies):
    sources, targets = copies
    cache = np.arange(NUM_ROWS * NUM_BLOCKS * 2, dtype=np.float32)
    cache = cache.reshape(NUM_ROWS, NUM_BLOCKS, 1, 2, 1)
    is_real = targets < NUM_BLOCKS
    expected = cache.copy()
    expected[:, targets[is_real]] = cache[:, sources[is_real]]
    k_cache, v_cache = JITTED(cache, -cache, sources, targets)
    np.testing.assert_array_equal(k_cache, expected)
    np.testing.assert_array_equal(v_cache, -expected)


@pytest.mark.parametrize(("num_rows", "num_copies"), [(1, 1), (4, 2), (4, 8)])
def test_donated_caches_are_not_copied(num_rows, num_copies):
    cache = jax.ShapeDtypeStruct((num_rows, 1024, 2, 16, 32), jnp.float32)
    ids = jax.ShapeDtypeStruct((num_copies,), jnp.int32)
    donated = jax.jit(block_copy_xla, donate_argnums=(0, 1))
    compiled = donated.lower(cache, cache, ids, ids).compile()
    memory = compiled.memory_analysis()
    cache_bytes = 4 * int(np.prod(cache.shape))
    page_bytes = cache_bytes // (num_rows * 1024)
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    # What is read waits for its writing: a page a copy, of one row, of K and of V.
    assert memory.temp_size_in_bytes <= 2 * num_copies * page_bytes + 4096
    text = compiled.as_text()
    dims = {f"{num_rows},1024,2,16,32", f"{num_rows * 1024},2,16,32"}
    copied = [
        line
        for line in text.splitlines()
        if re.search(r"= f32\[([\d,]+)\]\S* (copy|select)\(", line)
        and re.search(r"= f32\[([\d,]+)\]", line).group(1) in dims
    ]
    assert copied == []
    assert "input_output_alias" in text
