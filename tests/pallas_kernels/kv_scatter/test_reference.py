"""Tests of `kv_scatter/reference.py` against a loop in NumPy."""

import numpy as np
import pytest

from pallas_kernels.kv_scatter.cases import CASES, UINT16_CASES, build_inputs
from pallas_kernels.kv_scatter.reference import kv_scatter_reference


def scatter_in_numpy(kv_cache, k, v, slots, row):
    """Writes through a view of the cache that has K and V of a block as an axis of their own."""
    kv_cache = np.asarray(kv_cache).copy()
    parts = [np.asarray(part) for part in (k, v) if part is not None]
    num_rows, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    pages = kv_cache.reshape(num_rows, -1, len(parts), num_kv_heads, block_size, head_dim)
    for token_idx, slot in enumerate(np.asarray(slots)):
        if slot < pages.shape[1] * block_size:
            for part_idx, part in enumerate(parts):
                block, offset = divmod(slot, block_size)
                pages[row, block, part_idx, :, offset] = part[token_idx]
    return kv_cache


@pytest.mark.parametrize("case", CASES + UINT16_CASES, ids=lambda case: case.name)
def test_equals_a_loop_over_tokens(case, run_jitted):
    arguments = build_inputs(case).body_arguments
    kv_cache = run_jitted(kv_scatter_reference, *arguments)
    np.testing.assert_array_equal(np.asarray(kv_cache), scatter_in_numpy(*arguments))


def test_slot_names_a_block_and_an_offset(run_jitted):
    # Blocks of 8: slot 19 is offset 3 of block 2, whose keys and values are entries 4 and 5.
    cache = np.zeros((2, 8, 1, 8, 1), np.float32)
    token = np.ones((1, 1, 1), np.float32)
    slots = np.array([19], np.int32)
    kv_cache = np.asarray(run_jitted(kv_scatter_reference, cache, token, 2 * token, slots, 1))
    assert np.argwhere(kv_cache == 1).tolist() == [[1, 4, 0, 3, 0]]
    assert np.argwhere(kv_cache == 2).tolist() == [[1, 5, 0, 3, 0]]


def test_one_vector_per_token_is_one_entry_per_block(run_jitted):
    cache = np.zeros((2, 8, 1, 8, 1), np.float32)
    token = np.ones((1, 1, 1), np.float32)
    slots = np.array([19], np.int32)
    kv_cache = np.asarray(run_jitted(kv_scatter_reference, cache, token, None, slots, 1))
    assert np.argwhere(kv_cache).tolist() == [[1, 2, 0, 3, 0]]
