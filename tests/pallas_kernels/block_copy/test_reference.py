"""Tests of `block_copy/reference.py` against NumPy, which reads all blocks before it writes one."""

import numpy as np
import pytest

from pallas_kernels.block_copy.cases import CASES, build_inputs
from pallas_kernels.block_copy.reference import block_copy_reference


def copy_in_numpy(pages, sources, targets):
    old, new = np.asarray(pages), np.asarray(pages).copy()
    for source, target in zip(np.asarray(sources), np.asarray(targets), strict=True):
        if target < old.shape[1]:
            new[:, target] = old[:, source]
    return new


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    ids = (inputs.source_block_ids, inputs.target_block_ids)
    got = run_jitted(block_copy_reference, inputs.pages, *ids)
    np.testing.assert_array_equal(np.asarray(got), copy_in_numpy(inputs.pages, *ids))


def test_chain_copies_the_old_block(run_jitted):
    pages = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    ids = np.array([1, 2, 4], np.int32), np.array([2, 3, 4], np.int32)
    assert run_jitted(block_copy_reference, pages, *ids).ravel().tolist() == [0, 1, 1, 2]
