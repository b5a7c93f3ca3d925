"""Tests of `block_scatter/reference.py` against NumPy."""

import numpy as np
import pytest

from pallas_kernels.block_scatter.cases import CASES, build_inputs
from pallas_kernels.block_scatter.reference import block_scatter_reference


def scatter_in_numpy(pages, values, block_ids):
    pages, values = np.asarray(pages).copy(), np.asarray(values)
    for i, block_id in enumerate(np.asarray(block_ids)):
        if block_id < pages.shape[1]:
            pages[:, block_id] = values[:, i]
    return pages


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.pages, inputs.values, inputs.block_ids
    got = run_jitted(block_scatter_reference, *arguments)
    np.testing.assert_array_equal(np.asarray(got), scatter_in_numpy(*arguments))


def test_example_by_hand(run_jitted):
    # 2 rows of 3 blocks of one element; block 3 does not exist.
    pages = np.zeros((2, 3, 1), np.float32)
    values = np.array([[[1], [2]], [[3], [4]]], np.float32)
    got = run_jitted(block_scatter_reference, pages, values, np.array([3, 1], np.int32))
    assert got.tolist() == [[[0], [2], [0]], [[0], [4], [0]]]
