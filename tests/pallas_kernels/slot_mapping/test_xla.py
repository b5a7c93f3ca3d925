"""Tests of `slot_mapping/xla.py` against NumPy and the reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.reference import slot_mapping_reference
from pallas_kernels.slot_mapping.xla import slot_mapping_xla
from tests.pallas_kernels.slot_mapping.test_reference import map_in_numpy

BODIES = (slot_mapping_xla, slot_mapping_reference)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(slot_mapping_xla, *inputs.arrays, **inputs.options)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, map_in_numpy(inputs))


@settings(max_examples=30)  # most of them would show a wrong slot
@given(data=st.data())
def test_any_batch_equals_reference(run_jitted, data):
    num_reqs, num_tokens, max_blocks_per_req, block_size = 3, 12, 4, 4
    ends = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * num_reqs)))
    position = st.integers(0, max_blocks_per_req * block_size - 1)
    positions = data.draw(st.lists(position, min_size=num_tokens, max_size=num_tokens))
    positions[ends[-1] :] = [-(2**31)] * (num_tokens - ends[-1])  # padding holds anything
    tables = np.random.default_rng(0).permutation(100)[: 2 * num_reqs * max_blocks_per_req]
    arrays = (
        np.array([positions, positions], np.int32),
        tables.reshape(2, num_reqs, max_blocks_per_req).astype(np.int32),
        np.array([0, *ends], np.int32),
    )
    options = {"block_size": block_size, "pad_slot": 10_000}
    got, wanted = (run_jitted(body, *arrays, **options) for body in BODIES)
    np.testing.assert_array_equal(got, wanted)
