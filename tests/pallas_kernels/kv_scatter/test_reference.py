"""Tests of `kv_scatter/reference.py` against a loop in NumPy."""

import numpy as np
import pytest

from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from pallas_kernels.kv_scatter.reference import kv_scatter_reference


def scatter_in_numpy(cache, new, slots, row):
    cache = np.asarray(cache).copy()
    block_size = cache.shape[3]
    for token, slot in zip(np.asarray(new), np.asarray(slots), strict=True):
        if slot < cache.shape[1] * block_size:
            cache[row, slot // block_size, :, slot % block_size] = token
    return cache


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_a_loop_over_tokens(case, run_jitted):
    arguments = build_inputs(case).body_arguments
    k_cache, v_cache, k, v, slots, row = arguments
    expected_k = scatter_in_numpy(k_cache, k, slots, row)
    expected_v = scatter_in_numpy(v_cache, v, slots, row)
    k_cache, v_cache = run_jitted(kv_scatter_reference, *arguments)
    np.testing.assert_array_equal(np.asarray(k_cache), expected_k)
    np.testing.assert_array_equal(np.asarray(v_cache), expected_v)


def test_slot_names_a_block_and_an_offset(run_jitted):
    # Blocks of 8: slot 19 is offset 3 of block 2.
    cache = np.zeros((2, 4, 1, 8, 1), np.float32)
    token = np.ones((1, 1, 1), np.float32)
    slots = np.array([19], np.int32)
    k_cache, _ = run_jitted(kv_scatter_reference, cache, cache, token, token, slots, 1)
    assert np.argwhere(np.asarray(k_cache)).tolist() == [[1, 2, 0, 3, 0]]
