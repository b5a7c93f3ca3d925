"""Tests of `slot_mapping/pallas_portable.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.pallas_portable import slot_mapping_pallas
from pallas_kernels.slot_mapping.reference import slot_mapping_reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(slot_mapping_pallas, *inputs.arrays, **inputs.options)
    wanted = run_jitted(slot_mapping_reference, *inputs.arrays, **inputs.options)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
