"""Tests of `block_scatter/reference.py` against NumPy."""

import numpy as np
import pytest

from pallas_kernels.block_scatter.cases import CASES, build_inputs
from pallas_kernels.block_scatter.reference import block_scatter_reference


def scatter_in_numpy(cache, blocks, block_ids):
    cache, blocks = np.asarray(cache).copy(), np.asarray(blocks)
    for i, block_id in enumerate(np.asarray(block_ids)):
        if block_id < cache.shape[1]:
            cache[:, block_id] = blocks[:, i]
    return cache


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    caches, blocks = (inputs.k_cache, inputs.v_cache), (inputs.k_blocks, inputs.v_blocks)
    got = run_jitted(block_scatter_reference, *caches, *blocks, inputs.block_ids)
    for got_cache, cache, new in zip(got, caches, blocks, strict=True):
        expected = scatter_in_numpy(cache, new, inputs.block_ids)
        np.testing.assert_array_equal(np.asarray(got_cache), expected)


def test_example_by_hand(run_jitted):
    # 2 rows of 3 blocks of one element; block 3 does not exist.
    cache = np.zeros((2, 3, 1, 1, 1), np.float32)
    blocks = np.array([[1, 2], [3, 4]], np.float32).reshape(2, 2, 1, 1, 1)
    ids = np.array([3, 1], np.int32)
    k_cache, v_cache = run_jitted(block_scatter_reference, cache, cache, blocks, -blocks, ids)
    assert k_cache.reshape(2, 3).tolist() == [[0, 2, 0], [0, 4, 0]]
    assert v_cache.reshape(2, 3).tolist() == [[0, -2, 0], [0, -4, 0]]
