"""`BurstRepeater`: in steady decode a burst is the one before it, moved on."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.runner.batch.built_step import BuiltStep
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.shapes.packed_layout import PackedLayout, table_field


class BurstRepeater:
    """Builds bursts that differ from the one before them in positions and new blocks alone.

    Every row must have drawn a token in each step of `built`: the last of them is on the device,
    at the row's place, also where the host has it by now. So nothing is gathered from the rows but
    what moves. While the device computes on the same processor every NumPy call finds cold caches,
    and takes some ten microseconds, however few the rows.
    """

    def __init__(self, input_batch: InputBatch, built: BuiltStep) -> None:
        self._rows = input_batch
        self._last = built
        self._spans = PackedLayout(built.shape).spans()
        self._places_np = np.arange(len(built.rows_np), dtype=np.int32)
        self._place_of_row = {row: place for place, row in enumerate(built.rows_np.tolist())}
        # Of the tokens that the next burst computes first: i32[num_reqs].
        self._positions_np = self._view(built.packed_np, "positions")[: len(built.rows_np)].copy()
        self._positions_np += built.num_drawn_of_each

    def repeat(
        self,
        scheduler_output: SchedulerOutput,
        rows_np: np.ndarray,  # i32[num_reqs], of `InputBatch.rows_of`
        grown_rows: Sequence[int],  # of `InputBatch.take_grown_rows`
    ) -> BuiltStep | None:
        """The next burst; None where it is another one, or must be looked at more closely."""
        last, num_reqs = self._last, len(rows_np)
        num_steps = last.num_drawn_of_each
        is_same = (
            rows_np is last.rows_np
            and scheduler_output.num_decode_steps == num_steps
            and scheduler_output.total_num_scheduled_tokens == num_steps * num_reqs
        )
        if not is_same:
            return None
        positions_np = self._rows.num_computed_tokens_np[rows_np]
        if not (positions_np == self._positions_np).all():
            return None
        packed_np = last.packed_np.copy()
        groups_np = self._views_of_groups(packed_np)
        self._copy_tables([group_np for group_np, _ in groups_np], grown_rows)
        if not self._have_blocks(groups_np, positions_np, num_steps):
            return None
        self._view(packed_np, "positions")[:num_reqs] = positions_np
        self._view(packed_np, "token_source")[:num_reqs] = self._places_np
        self._positions_np += num_steps
        self._last = dataclasses.replace(last, packed_np=packed_np)
        return self._last

    def _view(self, packed_np: np.ndarray, name: str) -> np.ndarray:
        words, dims = self._spans[name]
        return packed_np[words].reshape(dims)

    def _views_of_groups(self, packed_np: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """The block tables i32[num_reqs, max_blocks_per_req] of each group, and its block size."""
        return [
            (group_np, table.block_size)
            for inputs_idx, table in enumerate(self._last.shape.tables)
            for group_np in self._view(packed_np, table_field(inputs_idx))
        ]

    def _copy_tables(
        self,
        groups_np: Sequence[np.ndarray],  # i32[num_reqs, max_blocks_per_req] each
        grown_rows: Sequence[int],
    ) -> None:
        # Rows that got blocks and are not in the step are in none of its places.
        rows = [row_idx for row_idx in grown_rows if row_idx in self._place_of_row]
        if not rows:
            return
        places = [self._place_of_row[row_idx] for row_idx in rows]
        for group_np, table in zip(groups_np, self._rows.block_tables.tables, strict=True):
            group_np[places] = table.block_ids_np[rows]

    def _have_blocks(
        self,
        groups_np: Sequence[tuple[np.ndarray, int]],  # of `_views_of_groups`
        positions_np: np.ndarray,  # i32[num_reqs]
        num_steps: int,
    ) -> bool:
        """Whether all tokens go to blocks of their rows, which have the null block behind them."""
        last_position = int(positions_np.max()) + num_steps - 1
        for group_np, block_size in groups_np:
            if last_position >= group_np.shape[1] * block_size:
                return False
            for step_idx in {*range(0, num_steps, block_size), num_steps - 1}:
                block_idx_np = (positions_np + step_idx) // block_size
                if not group_np[self._places_np, block_idx_np].all():
                    return False
        return True
