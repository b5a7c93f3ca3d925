"""Tests of `block_gather/reference.py` against NumPy."""

import numpy as np
import pytest

from pallas_kernels.block_gather.cases import CASES, build_inputs
from pallas_kernels.block_gather.reference import block_gather_reference


def gather_in_numpy(pages, block_ids):
    pages = np.asarray(pages)
    num_blocks = pages.shape[1]
    values = np.zeros((pages.shape[0], len(block_ids), *pages.shape[2:]), pages.dtype)
    for i, block_id in enumerate(np.asarray(block_ids)):
        if block_id < num_blocks:
            values[:, i] = pages[:, block_id]
    return values


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.pages, inputs.block_ids
    got = run_jitted(block_gather_reference, *arguments)
    np.testing.assert_array_equal(np.asarray(got), gather_in_numpy(*arguments))


def test_example_by_hand(run_jitted):
    # 2 rows of 3 blocks of one element; block 3 does not exist.
    pages = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    values = run_jitted(block_gather_reference, pages, np.array([2, 3, 0], np.int32))
    assert values.tolist() == [[[2], [0], [0]], [[5], [0], [3]]]
