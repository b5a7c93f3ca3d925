"""Steps of one token per request, which read states from one slot and write them to another."""

import jax.numpy as jnp
import numpy as np

from paxkv.runner.programs.make_batch import make_decode_batch
from paxkv.runner.shapes.program_shapes import TableShape

SHAPE = TableShape(num_groups=2, max_blocks_per_req=2, block_size=8, is_state=True)
NUM_REQS = 4


def decode_batch(positions, switches, is_alive):
    """A batch of one token per request.

    Row r has blocks 10 r + 1 to 10 r + 4 in its first slot, and 10 r + 5 to 10 r + 8 in its second.
    """
    rows_np = 10 * np.arange(NUM_REQS)[None, :, None]
    part_np = rows_np + np.array([[[1, 2]], [[3, 4]]])
    return make_decode_batch(
        token_ids=jnp.zeros(NUM_REQS, jnp.int32),
        positions=jnp.array(positions),
        num_used=NUM_REQS,
        block_tables=[jnp.stack([part_np, part_np + 4])],
        table_shapes=[SHAPE],
        is_alive=jnp.array(is_alive),
        slot_switches=None if switches is None else jnp.array(switches),
    )


def slots_of_step(positions, switches, is_alive):
    """Blocks that the rows read and write, each i32[num_groups, num_reqs, 2]."""
    (inputs,) = decode_batch(positions, switches, is_alive).groups
    return inputs.read_slots.tolist(), inputs.write_slots.tolist()


def test_slots_change_at_the_position_of_the_switch():
    # Before, at and after the switch: the state before the switch's token stays in the first slot.
    reads, writes = slots_of_step([4, 5, 6, 5], [5, 5, 5, 5], [True, True, True, False])
    assert reads == [[[1, 2], [11, 12], [25, 26], [0, 0]], [[3, 4], [13, 14], [27, 28], [0, 0]]]
    assert [part[:3] for part in writes] == [
        [[1, 2], [15, 16], [25, 26]],
        [[3, 4], [17, 18], [27, 28]],
    ]


def test_without_a_switch_all_rows_read_the_first_slot_and_write_the_second():
    reads, writes = slots_of_step([0, 5, 9, 1], None, [True] * 4)
    # A row that starts from zero reads the null block.
    assert reads[0] == [[0, 0], [11, 12], [21, 22], [31, 32]]
    assert writes[1] == [[7, 8], [17, 18], [27, 28], [37, 38]]


def test_logits_of_every_row_are_those_of_its_token():
    batch = decode_batch([0, 5, 9, 1], None, [True] * 4)
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4]
