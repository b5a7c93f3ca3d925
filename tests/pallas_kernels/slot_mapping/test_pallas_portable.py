"""Tests of `slot_mapping/pallas_portable.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.pallas_portable import slot_mapping_pallas
from pallas_kernels.slot_mapping.reference import slot_mapping_reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    arrays = (inputs.positions, inputs.block_tables, inputs.query_start_loc)
    sizes = {"block_size": inputs.block_size, "pad_slot": inputs.pad_slot}
    got = run_jitted(slot_mapping_pallas, *arrays, **sizes)
    wanted = run_jitted(slot_mapping_reference, *arrays, **sizes)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
