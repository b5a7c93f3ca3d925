"""Turns a step's block copies and its blocks to be zeroed into small arrays for the device."""

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.shapes.step_buckets import StepBuckets

_NULL_BLOCK_ID = 0


def build_block_copies(
    scheduler_output: SchedulerOutput, buckets: StepBuckets, *, num_blocks: int
) -> list[np.ndarray]:  # i32[2, num_copies] each: sources, targets
    """Returns the copies to make before a step writes, in as few calls as possible.

    A block is zeroed by copying the null block, which is never written. If a block is the target of
    several copies, the last copy counts, and a copy counts more than zeroing: the earlier ones
    belong to a request that lost the block while the scheduler decided the step.

    Raises:
        InvariantError: A block is not in the pool or is the null block; or there are more copies
            than requests times groups. One call must read all sources before it writes a target.
    """
    source_of = {
        copy.target_block_id: copy.source_block_id for copy in scheduler_output.block_copies
    }
    max_num_copies = buckets.copy_shapes[-1].num_copies
    if len(source_of) > max_num_copies:
        raise InvariantError(
            f"a step copies at most {max_num_copies} blocks, got {len(source_of)}."
        )
    # Behind the copies, because a block to be zeroed may be the source of one.
    for block_id in scheduler_output.new_block_ids_to_zero:
        source_of.pop(block_id, None)
        source_of[block_id] = _NULL_BLOCK_ID
    if not source_of:
        return []
    _check_ids(source_of, num_blocks)
    copies_np = np.array([list(source_of.values()), list(source_of)], np.int32)
    return [
        _padded(copies_np[:, start : start + max_num_copies], buckets, num_blocks)
        for start in range(0, len(source_of), max_num_copies)
    ]


def _padded(copies_np: np.ndarray, buckets: StepBuckets, num_blocks: int) -> np.ndarray:
    num_copies = copies_np.shape[1]
    shape = buckets.copy_shape_for(num_copies)
    # Padding lies past the end of the pool, where the op drops it. Fresh memory for every step.
    padded_np = np.full((2, shape.num_copies), num_blocks, np.int32)
    padded_np[:, :num_copies] = copies_np
    return padded_np


def _check_ids(source_of: dict[int, int], num_blocks: int) -> None:
    bad_targets = [block_id for block_id in source_of if not 0 < block_id < num_blocks]
    bad_sources = [block_id for block_id in source_of.values() if not 0 <= block_id < num_blocks]
    if bad_targets or bad_sources:
        raise InvariantError(
            f"block copies must write to blocks in [1, {num_blocks}) and read blocks in "
            f"[0, {num_blocks}), got targets {bad_targets} and sources {bad_sources}."
        )
