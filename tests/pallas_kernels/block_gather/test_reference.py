"""Tests of `block_gather/reference.py` against NumPy."""

import numpy as np
import pytest

from pallas_kernels.block_gather.cases import CASES, build_inputs
from pallas_kernels.block_gather.reference import block_gather_reference


def gather_in_numpy(cache, block_ids):
    cache = np.asarray(cache)
    num_blocks = cache.shape[1]
    blocks = np.zeros((cache.shape[0], len(block_ids), *cache.shape[2:]), cache.dtype)
    for i, block_id in enumerate(np.asarray(block_ids)):
        if block_id < num_blocks:
            blocks[:, i] = cache[:, block_id]
    return blocks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.k_cache, inputs.v_cache, inputs.block_ids
    got = run_jitted(block_gather_reference, *arguments)
    for got_blocks, cache in zip(got, arguments[:2], strict=True):
        expected = gather_in_numpy(cache, inputs.block_ids)
        np.testing.assert_array_equal(np.asarray(got_blocks), expected)


def test_example_by_hand(run_jitted):
    # 2 rows of 3 blocks of one element; block 3 does not exist.
    cache = np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1, 1)
    ids = np.array([2, 3, 0], np.int32)
    k_blocks, v_blocks = run_jitted(block_gather_reference, cache, cache + 10, ids)
    assert k_blocks.reshape(2, 3).tolist() == [[2, 0, 0], [5, 0, 3]]
    assert v_blocks.reshape(2, 3).tolist() == [[12, 0, 10], [15, 0, 13]]
