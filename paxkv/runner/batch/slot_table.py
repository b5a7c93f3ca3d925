"""`SlotTable`: the slots of states of every row of the batch."""

from collections.abc import Sequence

import numpy as np

from paxkv.errors import InvariantError
from paxkv.runner.shapes.program_shapes import SLOTS_PER_ROW, SlotShape


class SlotTable:
    """The slots of one KV cache group of states. A row has all blocks of a slot, or none.

    Slots have indices. The device keeps the blocks of the last `SLOTS_PER_ROW` slots of each row,
    and `pack_new_slots` returns the blocks that the device does not have yet. So a step gets only
    two indices for each request, and steady decode sends no blocks.

    Args:
        num_blocks: Blocks of the pool.

    Attributes:
        slots_np: i32[2, max_num_seqs], indices of the slots that the next step reads and writes.
            Slot 0 consists of null blocks. A row gets a new slot so that its old one keeps the
            state of earlier tokens.
        num_blocks_np: i32[max_num_seqs], blocks of each row's slot.
    """

    def __init__(self, shape: SlotShape, *, max_num_seqs: int, num_blocks: int) -> None:
        self.slots_np = np.zeros((2, max_num_seqs), np.int32)
        self.num_blocks_np = np.zeros(max_num_seqs, np.int32)
        self._shape = shape
        self._num_slot_blocks = shape.num_groups * shape.blocks_per_state
        self._num_pool_blocks = num_blocks
        # The slots of each row that have an index, the least recently used first.
        self._known: list[list[tuple[Sequence[int], int]]] = [[] for _ in range(max_num_seqs)]
        self._new_slots: dict[int, Sequence[int]] = {}  # index -> blocks

    def append_row(self, row_idx: int, block_ids: Sequence[int]) -> None:
        """Gives a row a slot to write.

        Args:
            block_ids: The slot to write, or the slot to read followed by the slot to write. With
                one slot, the row reads its old slot, or the new slot if it has no old one.

        Raises:
            InvariantError: A block id is not in the pool, or the slots are not whole.
        """
        if not block_ids:
            return
        size = self._num_slot_blocks
        if len(block_ids) == size:
            read_idx = int(self.slots_np[1, row_idx])
            written_idx = self._find_or_add(row_idx, block_ids)
        elif len(block_ids) == 2 * size:
            read_idx = self._find_or_add(row_idx, block_ids[:size])
            written_idx = self._find_or_add(row_idx, block_ids[size:])
        else:
            raise InvariantError(
                f"expected the {size} blocks of one slot or the {2 * size} of two, got "
                f"{len(block_ids)}."
            )
        self.slots_np[0, row_idx] = read_idx or written_idx
        self.slots_np[1, row_idx] = written_idx
        self.num_blocks_np[row_idx] = size

    def append_one_each(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        for row_idx, block_id in zip(rows, block_ids, strict=True):
            self.append_row(row_idx, (block_id,))

    def clear_row(self, row_idx: int) -> None:
        self.slots_np[:, row_idx] = 0
        self.num_blocks_np[row_idx] = 0
        self._known[row_idx].clear()

    def finish_moves(self) -> None:
        """Makes all rows read the slots that they write."""
        self.slots_np[0] = self.slots_np[1]

    def pack_new_slots(self) -> list[np.ndarray]:  # i32[`SlotShape.packed_dims`] each
        """Packs the slots that the device does not have yet, for `write_slots`."""
        if not self._new_slots:
            return []
        new, self._new_slots = list(self._new_slots.items()), {}
        calls = []
        for start in range(0, len(new), self._shape.num_written):
            packed_np = np.zeros(self._shape.packed_dims, np.int32)
            packed_np[:, 0] = self._shape.num_slots  # the device ignores unused entries
            for entry_np, (slot_idx, block_ids) in zip(
                packed_np, new[start : start + self._shape.num_written], strict=False
            ):
                entry_np[0] = slot_idx
                entry_np[1:] = block_ids
            calls.append(packed_np)
        return calls

    def _find_or_add(self, row_idx: int, block_ids: Sequence[int]) -> int:
        """Returns the index of a slot. A new slot takes that of the least recently used one.

        The row's last slot is never the least recently used one.
        """
        known = self._known[row_idx]
        for place, (known_ids, slot_idx) in enumerate(known):
            # The scheduler never changes the list of a slot, and `known` keeps it alive.
            if known_ids is block_ids:
                known.append(known.pop(place))
                return slot_idx
        check_block_ids(block_ids, self._num_pool_blocks)
        if len(known) < SLOTS_PER_ROW:
            slot_idx = 1 + row_idx * SLOTS_PER_ROW + len(known)
        else:
            slot_idx = known.pop(0)[1]
        known.append((block_ids, slot_idx))
        self._new_slots[slot_idx] = block_ids
        return slot_idx


def check_block_ids(block_ids: Sequence[int], num_pool_blocks: int) -> None:
    """Raises InvariantError if a block is not in the pool."""
    if min(block_ids) < 0 or max(block_ids) >= num_pool_blocks:
        raise InvariantError(f"block ids must be in [0, {num_pool_blocks}), got {list(block_ids)}.")
