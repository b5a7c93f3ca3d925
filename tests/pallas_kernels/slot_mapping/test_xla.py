"""Tests of `slot_mapping/xla.py` against the reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.reference import slot_mapping_reference
from pallas_kernels.slot_mapping.xla import slot_mapping_xla

BODIES = (slot_mapping_xla, slot_mapping_reference)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(slot_mapping_xla, *inputs.arrays, **inputs.options)
    wanted = run_jitted(slot_mapping_reference, *inputs.arrays, **inputs.options)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("world_size", "interleave"), [(2, 1), (2, 8), (4, 2), (4, 8), (8, 1), (8, 2)]
)
def test_ranks_together_hold_each_token_exactly_once(world_size, interleave, run_jitted):
    """Simulates every rank of a request; slot and rank lead back to the position."""
    block_size, num_tokens = 8, 8 * world_size * 3 + 5
    block_table = [5, 2, 9, 4]  # the same on every rank
    is_held_np = np.zeros((world_size, 10 * block_size), bool)
    held = []

    def slots_of_every_rank(*arrays):
        options = {"block_size": block_size, "pad_slot": 1000, "cp_interleave": interleave}
        options["cp_world_size"] = world_size
        return [slot_mapping_xla(*arrays, cp_rank=rank, **options) for rank in range(world_size)]

    slots_of_ranks = run_jitted(
        slots_of_every_rank,
        np.arange(num_tokens, dtype=np.int32)[None],
        np.array([[block_table]], np.int32),
        np.array([0, num_tokens], np.int32),
    )
    for rank in range(world_size):
        slots_np = np.asarray(slots_of_ranks[rank])[0]
        own_positions = np.flatnonzero(slots_np != 1000)
        assert not is_held_np[rank, slots_np[own_positions]].any()
        is_held_np[rank, slots_np[own_positions]] = True
        held += own_positions.tolist()
        for position in own_positions.tolist():
            block_id, offset = divmod(int(slots_np[position]), block_size)
            own = block_table.index(block_id) * block_size + offset
            stripe, place = divmod(own, interleave)
            assert (stripe * world_size + rank) * interleave + place == position
    assert sorted(held) == list(range(num_tokens))
    assert is_held_np.sum() == num_tokens


@settings(max_examples=100)
@given(data=st.data())
def test_any_batch_equals_reference(run_jitted, data):
    num_reqs, num_tokens, max_blocks_per_req, block_size = 3, 12, 4, 4
    world_size, rank, interleave = data.draw(st.sampled_from([(1, 0, 1), (2, 1, 4), (4, 2, 2)]))
    ends = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * num_reqs)))
    position = st.integers(0, max_blocks_per_req * block_size * world_size - 1)
    positions = data.draw(st.lists(position, min_size=num_tokens, max_size=num_tokens))
    positions[ends[-1] :] = [-(2**31)] * (num_tokens - ends[-1])  # padding holds anything
    tables = np.random.default_rng(0).permutation(100)[: 2 * num_reqs * max_blocks_per_req]
    arrays = (
        np.array([positions, positions], np.int32),
        tables.reshape(2, num_reqs, max_blocks_per_req).astype(np.int32),
        np.array([0, *ends], np.int32),
    )
    options = {"cp_world_size": world_size, "cp_rank": rank, "cp_interleave": interleave}
    options |= {"block_size": block_size, "pad_slot": 10_000}
    got, wanted = (run_jitted(body, *arrays, **options) for body in BODIES)
    np.testing.assert_array_equal(got, wanted)
