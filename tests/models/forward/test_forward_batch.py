"""`ForwardBatch` travels through jit."""

import jax
import numpy as np

from models.forward.forward_batch import ForwardBatch, GroupInputs


def group_of(num_groups: int, max_blocks_per_req: int, block_size: int) -> GroupInputs:
    return GroupInputs(
        block_tables=np.zeros((num_groups, 2, max_blocks_per_req), np.int32),
        seq_lens=np.zeros(2, np.int32),
        block_size=block_size,
    )


def test_a_batch_is_four_arrays_and_two_for_each_kind_of_block_table():
    batch = ForwardBatch(
        token_ids=np.zeros(4, np.int32),
        positions=np.zeros(4, np.int32),
        query_start_loc=np.zeros(3, np.int32),
        groups=(group_of(3, 10, 8), group_of(1, 5, 16)),
        logits_indices=np.zeros(2, np.int32),
    )
    assert len(jax.tree.leaves(batch)) == 4 + 2 * 2
    returned = jax.jit(lambda b: b)(batch)
    shapes = [(inputs.block_tables.shape, inputs.block_size) for inputs in returned.groups]
    # The block size is known where a program is traced.
    assert shapes == [((3, 2, 10), 8), ((1, 2, 5), 16)]
