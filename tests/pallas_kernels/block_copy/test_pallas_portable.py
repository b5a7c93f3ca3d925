"""Tests of `block_copy/pallas_portable.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.block_copy.cases import CASES, build_inputs
from pallas_kernels.block_copy.pallas_portable import block_copy_pallas
from pallas_kernels.block_copy.reference import block_copy_reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    ids = (inputs.source_block_ids, inputs.target_block_ids)
    got = run_jitted(block_copy_pallas, inputs.k_cache, inputs.v_cache, *ids)
    wanted = run_jitted(block_copy_reference, inputs.k_cache, inputs.v_cache, *ids)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))
