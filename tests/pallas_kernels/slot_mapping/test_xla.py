"""Tests of `slot_mapping/xla.py` against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.reference import slot_mapping_reference
from pallas_kernels.slot_mapping.xla import slot_mapping_xla


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    got = run_jitted(slot_mapping_xla, *inputs.arrays, **inputs.options)
    wanted = run_jitted(slot_mapping_reference, *inputs.arrays, **inputs.options)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 8])
def test_ranks_together_hold_each_token_exactly_once(world_size, interleave, run_jitted):
    """Simulates every rank of a request; slot and rank lead back to the position."""
    block_size, num_tokens = 8, 8 * world_size * 3 + 5
    block_table = [5, 2, 9, 4]  # the same on every rank
    is_held_np = np.zeros((world_size, 10 * block_size), bool)
    held = []
    for rank in range(world_size):
        slots_np = np.asarray(
            run_jitted(
                slot_mapping_xla,
                jnp.arange(num_tokens, dtype=jnp.int32)[None],
                jnp.array([[block_table]], jnp.int32),
                jnp.array([0, num_tokens], jnp.int32),
                block_size=block_size,
                pad_slot=1000,
                cp_world_size=world_size,
                cp_rank=rank,
                cp_interleave=interleave,
            )
        )[0]
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
