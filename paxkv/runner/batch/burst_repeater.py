"""`BurstRepeater`: builds bursts of steady decode from the burst before."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.runner.batch.built_step import BuiltStep
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.batch.state_slots import fill_slot_switches
from paxkv.runner.shapes.packed_layout import PackedLayout, table_field


class BurstRepeater:
    """Builds bursts that differ from the burst before them only in positions and new blocks.

    Every request must draw a token in each step of `built`. Its last token is then on the device,
    so the repeater copies only what changes. This saves NumPy calls, which are slow on a processor
    that also computes the model, because they find cold caches.
    """

    def __init__(self, input_batch: InputBatch, built: BuiltStep) -> None:
        self._rows = input_batch
        self._last = built
        self._spans = PackedLayout(built.shape).spans()
        self._places_np = np.arange(len(built.rows_np), dtype=np.int32)
        kv_cache_groups = itertools.chain.from_iterable(
            [shape] * shape.num_kv_cache_groups for shape in built.shape.tables
        )
        tables = zip(input_batch.block_tables.tables, kv_cache_groups, strict=True)
        self._token_tables, self._slot_tables = [], []
        for table, shape in tables:
            (self._slot_tables if shape.is_state else self._token_tables).append(table)
        self._place_of_row = {row: place for place, row in enumerate(built.rows_np.tolist())}
        # Positions of the tokens that the next burst computes first: i32[num_reqs].
        self._positions_np = self._view(built.packed_np, "positions")[: len(built.rows_np)].copy()
        self._positions_np += built.num_drawn_of_each

    def repeat(
        self,
        scheduler_output: SchedulerOutput,
        rows_np: np.ndarray,  # i32[num_reqs], of `InputBatch.rows_of`
        grown_rows: Sequence[int],  # of `InputBatch.drain_grown_rows`
    ) -> BuiltStep | None:
        """Returns the next burst. None if `BatchBuilder` must build it anew."""
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
        self._copy_slots(packed_np)
        if not self._have_blocks(groups_np, positions_np, num_steps):
            return None
        self._view(packed_np, "positions")[:num_reqs] = positions_np
        self._view(packed_np, "token_source")[:num_reqs] = self._places_np
        if self._slot_tables:
            fill_slot_switches(
                self._view(packed_np, "slot_switch"),
                positions_np,
                last.req_ids,
                scheduler_output.slot_switches,
            )
        self._positions_np += num_steps
        self._last = dataclasses.replace(last, packed_np=packed_np)
        return self._last

    def _view(self, packed_np: np.ndarray, name: str) -> np.ndarray:
        words, dims = self._spans[name]
        return packed_np[words].reshape(dims)

    def _views_of_groups(self, packed_np: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """The block tables i32[num_reqs, max_blocks_per_req] of each group, and its block size.

        Groups of states are left out.
        """
        return [
            (group_np, table.block_size)
            for inputs_idx, table in enumerate(self._last.shape.tables)
            if not table.is_state
            for group_np in self._view(packed_np, table_field(inputs_idx))
        ]

    def _copy_tables(
        self,
        groups_np: Sequence[np.ndarray],  # i32[num_reqs, max_blocks_per_req] each
        grown_rows: Sequence[int],
    ) -> None:
        # Rows that are not in the step may have grown too.
        rows = [row_idx for row_idx in grown_rows if row_idx in self._place_of_row]
        if not rows:
            return
        places = [self._place_of_row[row_idx] for row_idx in rows]
        for group_np, table in zip(groups_np, self._token_tables, strict=True):
            group_np[places] = table.block_ids_np[rows]

    def _copy_slots(self, packed_np: np.ndarray) -> None:
        rows_np = self._last.rows_np
        slot_tables = iter(self._slot_tables)
        for inputs_idx, table in enumerate(self._last.shape.tables):
            if table.is_state:
                slots_np = self._view(packed_np, table_field(inputs_idx))
                slots_np[:, : len(rows_np)] = next(slot_tables).slots_np[:, rows_np]

    def _have_blocks(
        self,
        groups_np: Sequence[tuple[np.ndarray, int]],  # of `_views_of_groups`
        positions_np: np.ndarray,  # i32[num_reqs]
        num_steps: int,
    ) -> bool:
        """Whether the rows have blocks for all tokens. After its last block, a row has zeros."""
        last_position = int(positions_np.max()) + num_steps - 1
        for group_np, block_size in groups_np:
            if last_position >= group_np.shape[1] * block_size:
                return False
            for step_idx in {*range(0, num_steps, block_size), num_steps - 1}:
                block_idx_np = (positions_np + step_idx) // block_size
                if not group_np[self._places_np, block_idx_np].all():
                    return False
        return True
