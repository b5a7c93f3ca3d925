"""`BlockTable`: the physical blocks of every row of the batch, per KV cache group."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from paxkv.errors import InvariantError


class BlockTable:
    """The block ids of one KV cache group. Unused columns of a row are 0, the null block.

    Blocks before a sliding window stay in their row after the scheduler has freed them. No program
    reads or writes at their positions.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks_per_req: int, num_blocks: int) -> None:
        self.block_ids_np = np.zeros((max_num_seqs, max_blocks_per_req), np.int32)
        self.num_blocks_np = np.zeros(max_num_seqs, np.int32)  # blocks held, per row
        self._num_pool_blocks = num_blocks

    def append_row(self, row_idx: int, block_ids: Sequence[int]) -> None:
        """Appends blocks to a row.

        Raises:
            InvariantError: A block id is not in the pool, or the row is full. The device would
                notice neither, because a gather clamps indices that are out of range.
        """
        if not block_ids:
            return
        self._check_ids(block_ids)
        start = int(self.num_blocks_np[row_idx])
        end = start + len(block_ids)
        if end > self.block_ids_np.shape[1]:
            raise InvariantError(
                f"a row holds at most {self.block_ids_np.shape[1]} blocks, got {end}."
            )
        self.block_ids_np[row_idx, start:end] = block_ids
        self.num_blocks_np[row_idx] = end

    def append_one_each(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Appends one block to each of several rows. Raises as `append_row`."""
        starts_np = self.num_blocks_np[rows]
        is_full = int(starts_np.max()) >= self.block_ids_np.shape[1]
        if is_full or min(block_ids) < 0 or max(block_ids) >= self._num_pool_blocks:
            for row_idx, block_id in zip(rows, block_ids, strict=True):
                self.append_row(row_idx, (block_id,))
            return
        self.block_ids_np[rows, starts_np] = block_ids
        self.num_blocks_np[rows] += 1

    def clear_row(self, row_idx: int) -> None:
        self.block_ids_np[row_idx, : self.num_blocks_np[row_idx]] = 0
        self.num_blocks_np[row_idx] = 0

    def _check_ids(self, block_ids: Sequence[int]) -> None:
        if min(block_ids) < 0 or max(block_ids) >= self._num_pool_blocks:
            raise InvariantError(
                f"block ids must be in [0, {self._num_pool_blocks}), got {list(block_ids)}."
            )


class SlotTable(BlockTable):
    """The slots of one KV cache group of states. A row has all blocks of a slot, or none.

    `block_ids_np` are the slots that the next step writes. It reads the states from `read_ids_np`.
    A row gets a new slot so that its old one keeps the state of earlier tokens.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks_per_req: int, num_blocks: int) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs, max_blocks_per_req=max_blocks_per_req, num_blocks=num_blocks
        )
        self.read_ids_np = np.zeros_like(self.block_ids_np)
        self._moving_rows: list[int] = []  # rows that read another slot than they write
        self._changed_rows: set[int] = set()
        # The last slots of each row, as the scheduler gave them and as arrays. A decoding request
        # writes three slots in turn, and the conversion would be most of the cost of a new slot.
        self._recent: list[deque[tuple[Sequence[int], np.ndarray]]] = [
            deque(maxlen=3) for _ in range(max_num_seqs)
        ]

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
        size = self.block_ids_np.shape[1]
        ids_np = self._find_or_convert(row_idx, block_ids)
        if self.num_blocks_np[row_idx] > 0 and len(ids_np) == size:
            self.read_ids_np[row_idx] = self.block_ids_np[row_idx]
        else:
            self.read_ids_np[row_idx] = ids_np[:size]
        self.block_ids_np[row_idx] = ids_np[-size:]
        self.num_blocks_np[row_idx] = size
        self._moving_rows.append(row_idx)

    def append_one_each(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        for row_idx, block_id in zip(rows, block_ids, strict=True):
            self.append_row(row_idx, (block_id,))

    def clear_row(self, row_idx: int) -> None:
        super().clear_row(row_idx)
        self.read_ids_np[row_idx] = 0
        self._recent[row_idx].clear()

    def finish_moves(self) -> None:
        """Makes all rows read the slots that they write."""
        rows, self._moving_rows = self._moving_rows, []
        if rows:
            self.read_ids_np[rows] = self.block_ids_np[rows]
            self._changed_rows.update(rows)

    def drain_changed_rows(self) -> list[int]:
        """Returns rows whose slots to read or to write changed since the last call."""
        rows, self._changed_rows = self._changed_rows.union(self._moving_rows), set()
        return list(rows)

    def _find_or_convert(self, row_idx: int, block_ids: Sequence[int]) -> np.ndarray:
        """Returns block ids as i32[len(block_ids)], after checking the ids that are not known."""
        recent = self._recent[row_idx]
        for known_ids, ids_np in recent:
            # The scheduler never changes the list of a slot, and `recent` keeps it alive.
            if known_ids is block_ids:
                return ids_np
        self._check_ids(block_ids)
        size = self.block_ids_np.shape[1]
        if len(block_ids) not in (size, 2 * size):
            raise InvariantError(f"a slot has {size} blocks, got {len(block_ids)}.")
        ids_np = np.array(block_ids, np.int32)
        if len(block_ids) == size:
            recent.append((block_ids, ids_np))
        return ids_np


class MultiGroupBlockTable:
    """One `BlockTable` per KV cache group, with the same rows."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self._slot_tables = tuple(table for table in tables if isinstance(table, SlotTable))

    def append_row(self, row_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Appends blocks to a row, one list per group."""
        for table, group_block_ids in zip(self.tables, block_ids, strict=True):
            table.append_row(row_idx, group_block_ids)

    def append_rows(
        self, rows: Sequence[int], block_ids: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Appends blocks to several different rows: for each row, one list per group."""
        for group_idx, table in enumerate(self.tables):
            of_group = [groups[group_idx] for groups in block_ids]
            if not any(of_group):
                continue
            # The usual case: a decoding request needs one block at a time.
            if all(len(row_block_ids) == 1 for row_block_ids in of_group):
                table.append_one_each(rows, [row_block_ids[0] for row_block_ids in of_group])
                continue
            for row_idx, row_block_ids in zip(rows, of_group, strict=True):
                table.append_row(row_idx, row_block_ids)

    def clear_row(self, row_idx: int) -> None:
        for table in self.tables:
            table.clear_row(row_idx)

    def finish_moves(self) -> None:
        """Ends the last step; see `SlotTable.finish_moves`."""
        for table in self._slot_tables:
            table.finish_moves()

    def drain_changed_slots(self) -> list[list[int]]:
        """Returns `SlotTable.drain_changed_rows` of each group of states."""
        return [table.drain_changed_rows() for table in self._slot_tables]
