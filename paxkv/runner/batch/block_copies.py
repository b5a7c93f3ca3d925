"""Turns a step's block copies into a small array for the device."""

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.shapes.step_buckets import StepBuckets


def build_block_copies(
    scheduler_output: SchedulerOutput, buckets: StepBuckets, *, num_blocks: int
) -> np.ndarray | None:  # i32[2, num_copies]: sources, targets
    """Returns the copies to make before a step writes; None if there are none.

    If a block is the target of several copies, the last copy counts: the earlier ones belong to a
    request that lost the block while the scheduler decided the step.

    Raises:
        InvariantError: A block is not in the pool or is the null block; or there are more copies
            than requests times groups. All copies of a step must fit into one call of the op,
            which reads all sources before it writes a target.
    """
    source_of = {
        copy.target_block_id: copy.source_block_id for copy in scheduler_output.block_copies
    }
    max_num_copies = buckets.copy_shapes[-1].num_copies
    if len(source_of) > max_num_copies:
        raise InvariantError(
            f"a step copies at most {max_num_copies} blocks, got {len(source_of)}."
        )
    if not source_of:
        return None
    _check_ids(source_of, num_blocks)
    shape = buckets.copy_shape_for(len(source_of))
    # The op drops padding, which is past the end of the pool. Every step needs a new array, because
    # the device may still read the array of the last step.
    copies_np = np.full((2, shape.num_copies), num_blocks, np.int32)
    copies_np[:, : len(source_of)] = [list(source_of.values()), list(source_of)]
    return copies_np


def _check_ids(source_of: dict[int, int], num_blocks: int) -> None:
    bad_targets = [block_id for block_id in source_of if not 0 < block_id < num_blocks]
    bad_sources = [block_id for block_id in source_of.values() if not 0 <= block_id < num_blocks]
    if bad_targets or bad_sources:
        raise InvariantError(
            f"block copies must write to blocks in [1, {num_blocks}) and read blocks in "
            f"[0, {num_blocks}), got targets {bad_targets} and sources {bad_sources}."
        )
