"""`BlockTable`: the physical blocks of every row of the batch, per KV cache group."""

from collections.abc import Sequence

import numpy as np

from paxkv.errors import InvariantError
from paxkv.runner.batch.slot_table import SlotTable, check_block_ids


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
        check_block_ids(block_ids, self._num_pool_blocks)
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


class MultiGroupBlockTable:
    """One table per KV cache group, with the same rows."""

    def __init__(self, tables: Sequence[BlockTable | SlotTable]) -> None:
        self.tables = tuple(tables)
        self.slot_tables = tuple(table for table in tables if isinstance(table, SlotTable))

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
        for table in self.slot_tables:
            table.finish_moves()
