"""Tests of `slot_mapping/reference.py` against a loop in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.reference import slot_mapping_reference


def map_in_numpy(inputs):
    positions = np.asarray(inputs.positions)
    block_tables = np.asarray(inputs.block_tables)
    query_start_loc = np.asarray(inputs.query_start_loc)
    slots = np.full(positions.shape, inputs.pad_slot)
    for group_idx, table in enumerate(block_tables):
        for req_idx, blocks in enumerate(table):
            for token_idx in range(query_start_loc[req_idx], query_start_loc[req_idx + 1]):
                position = int(positions[group_idx, token_idx])
                logical_block, offset = divmod(position, inputs.block_size)
                slots[group_idx, token_idx] = blocks[logical_block] * inputs.block_size + offset
    return slots


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_a_loop_over_tokens(case, run_jitted):
    inputs = build_inputs(case)
    slots = run_jitted(
        slot_mapping_reference,
        *inputs.arrays,
        **inputs.options,
    )
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, map_in_numpy(inputs))


def test_example_by_hand(run_jitted):
    # Blocks of 4, table [7, 3]: positions 4 and 5 are offsets 0 and 1 of block 3.
    slots = run_jitted(
        slot_mapping_reference,
        np.array([[4, 5, 0]], np.int32),
        np.array([[[7, 3]]], np.int32),
        np.array([0, 2], np.int32),
        block_size=4,
        pad_slot=99,
    )
    assert slots.tolist() == [[12, 13, 99]]
