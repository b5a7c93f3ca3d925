"""Tests of `kv_scatter/xla.py` against NumPy, and of slots that it must not change."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.kv_scatter.cases import CASES, UINT16_CASES, build_inputs
from pallas_kernels.kv_scatter.xla import kv_scatter_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.kv_scatter.test_reference import scatter_in_numpy
from tests.quick_compile import marked_sizes, quick_jit

NUM_TOKENS = 7
JITTED = quick_jit(kv_scatter_xla)


@pytest.mark.parametrize("case", CASES + UINT16_CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    # The row is traced here.
    arguments = build_inputs(case).body_arguments
    got = run_jitted(kv_scatter_xla, *arguments)
    assert got.dtype == arguments[0].dtype
    np.testing.assert_array_equal(np.asarray(got), scatter_in_numpy(*arguments))


@st.composite
def draw_slots(draw):
    """A cache's sizes; slots, of which the real ones differ; and a row."""
    num_rows, num_blocks, block_size = draw(st.sampled_from([(1, 3, 8), (3, 2, 4), (2, 5, 16)]))
    num_slots = num_blocks * block_size
    padding = pad_slot(num_rows, num_blocks, block_size)
    slot = st.one_of(st.integers(0, num_slots - 1), st.integers(padding, 2**31 - 1))
    slots = draw(st.lists(slot, min_size=NUM_TOKENS, max_size=NUM_TOKENS, unique=True))
    return (num_rows, num_blocks, block_size), slots, draw(st.integers(0, num_rows - 1))


@settings(max_examples=30)  # most of them would show a wrong slot
@given(draw_slots())
def test_any_slots_equal_numpy(drawn):
    (num_rows, num_blocks, block_size), slots, row = drawn
    cache = np.zeros((num_rows, 2 * num_blocks, 2, block_size, 3), np.float32)
    k = np.arange(1, NUM_TOKENS * 6 + 1, dtype=np.float32).reshape(NUM_TOKENS, 2, 3)
    expected = cache.copy()
    for token, slot in zip(k, slots, strict=True):
        if slot < num_blocks * block_size:
            block, offset = divmod(slot, block_size)
            expected[row, 2 * block, :, offset] = token
            expected[row, 2 * block + 1, :, offset] = -token
    kv_cache = JITTED(cache, k, -k, np.array(slots, np.int32), np.int32(row))
    np.testing.assert_array_equal(kv_cache, expected)


def test_padding_writes_nowhere():
    # Past one row would be the next row, and a negative index would be the last element.
    cache = np.zeros((3, 8, 2, 8, 16), np.float32)
    padding = pad_slot(3, 4, 8)
    slots = np.array([padding, padding + 1, 2 * padding, np.iinfo(np.int32).max], np.int32)
    token = np.ones((4, 2, 16), np.float32)
    for row in range(3):
        assert not np.asarray(JITTED(cache, token, token, slots, np.int32(row))).any()


# On JAX 0.10.2, of bfloat16, XLA:CPU copies the whole cache.
@pytest.mark.parametrize(
    "sizes",
    marked_sizes(
        [
            (1, 1, "float32", True),
            (1, 8, "float32", False),
            (2, 2, "float16", True),
            (1, 1, "uint16", False),
            (2, 8, "uint16", True),
        ],
        slow=[
            (1, 1, "float32", False),
            (2, 8, "float32", True),
            (1, 8, "float16", True),
            (1, 1, "uint16", True),
        ],
    ),
    ids=str,
)
def test_a_donated_cache_is_not_copied(sizes):
    num_kv_heads, num_tokens, dtype, has_v = sizes
    cache = jax.ShapeDtypeStruct((4, 1024, num_kv_heads, 16, 32), dtype)
    token = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, 32), dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), np.int32)
    row = jax.ShapeDtypeStruct((), np.int32)
    donated = jax.jit(kv_scatter_xla, donate_argnums=0)
    arguments = (cache, token, token if has_v else None, slots, row)
    memory = donated.lower(*arguments).compile(AS_FOR_USERS).memory_analysis()
    cache_bytes = cache.dtype.itemsize * int(np.prod(cache.shape))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 100
