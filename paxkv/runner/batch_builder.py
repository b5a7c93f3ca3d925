"""Turns the rows scheduled in a step into one packed int32 buffer for the device."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.bucketing import StepBuckets, StepShape
from paxkv.runner.input_batch import InputBatch
from paxkv.runner.packed_layout import PackedLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """One step's buffer, and what the host must know to read its answer.

    Args:
        packed_np: i32[num_words], owned by nobody else.
        req_ids: Requests of the step; request r is row r of the step's arrays.
        rows_np: i32[len(req_ids)], their rows in the `InputBatch`.
        is_sampled_np: bool[len(req_ids)], whether the step draws a token for the request; False
            while its prompt is not finished.
    """

    shape: StepShape
    packed_np: np.ndarray
    req_ids: list[str]
    rows_np: np.ndarray
    is_sampled_np: np.ndarray


class BatchBuilder:
    """Builds steps of the shapes in `buckets` from the rows of an `InputBatch`.

    Args:
        block_sizes: Of each KV cache group.
    """

    def __init__(
        self,
        *,
        buckets: StepBuckets,
        input_batch: InputBatch,
        max_num_seqs: int,
        block_sizes: Sequence[int],
    ) -> None:
        self._buckets = buckets
        self._rows = input_batch
        self._host_token = max_num_seqs  # the `token_source` that takes the token from `token_ids`
        self._block_sizes = tuple(block_sizes)

    def build(self, scheduler_output: SchedulerOutput) -> BuiltStep:
        """Packs one step; the rows must have been updated with `scheduler_output` before.

        Example: num_scheduled [2, 5, 3] -> query_start_loc [0, 2, 7, 10]
        -> request of each token [0, 0, 1, 1, 1, 1, 1, 2, 2, 2].

        Raises:
            InvariantError: A request would compute tokens that do not exist or have no block, or
                would write to the null block.
        """
        req_ids = list(scheduler_output.num_scheduled_tokens)
        num_scheduled_np = np.array(
            list(scheduler_output.num_scheduled_tokens.values()), dtype=np.int32
        )
        rows_np = self._rows.rows_of(req_ids)
        num_computed_np = self._rows.num_computed_tokens_np[rows_np]
        seq_lens_np = num_computed_np + num_scheduled_np
        num_reqs, num_tokens = len(req_ids), int(num_scheduled_np.sum())
        self._check(req_ids, rows_np, num_scheduled_np, seq_lens_np)

        shape = self._buckets.shape_for(num_tokens)
        layout = PackedLayout(shape)
        # Fresh for every step: on the CPU the device reads this very memory while the step runs.
        packed_np = np.zeros(layout.num_words, np.int32)
        views = layout.views(packed_np)

        query_start_loc_np = views["query_start_loc"]
        np.cumsum(num_scheduled_np, out=query_start_loc_np[1 : num_reqs + 1])
        query_start_loc_np[num_reqs + 1 :] = num_tokens
        req_of_token_np = np.repeat(np.arange(num_reqs, dtype=np.int32), num_scheduled_np)
        # Position = place in the step + (tokens computed before - start of the token's request).
        shift_np = num_computed_np - query_start_loc_np[:num_reqs]
        positions_np = views["positions"][:num_tokens]
        np.add(np.arange(num_tokens, dtype=np.int32), shift_np[req_of_token_np], out=positions_np)
        row_of_token_np = rows_np[req_of_token_np]
        self._check_written_blocks(req_ids, req_of_token_np, row_of_token_np, positions_np)
        self._fill_tokens(views, row_of_token_np, positions_np)

        views["seq_lens"][:, :num_reqs] = seq_lens_np
        for group_np, table in zip(
            views["block_tables"], self._rows.block_tables.tables, strict=True
        ):
            group_np[:num_reqs] = table.block_ids_np[rows_np]
        views["logits_indices"][:num_reqs] = query_start_loc_np[1 : num_reqs + 1] - 1
        views["sampling_rows"][:num_reqs] = self._rows.sampling_rows_np[rows_np]
        # The drawn token's own position: the draw must not depend on how the prompt was split.
        views["draw_position"][:num_reqs] = seq_lens_np
        return BuiltStep(
            shape=shape,
            packed_np=packed_np,
            req_ids=req_ids,
            rows_np=rows_np,
            is_sampled_np=seq_lens_np >= self._rows.num_tokens_np[rows_np],
        )

    def _fill_tokens(
        self, views: dict[str, np.ndarray], row_of_token_np: np.ndarray, positions_np: np.ndarray
    ) -> None:
        num_tokens = len(positions_np)
        token_source_np = views["token_source"]
        token_source_np[:] = self._host_token
        is_on_device_np = positions_np >= self._rows.num_tokens_np[row_of_token_np]
        host_positions_np = np.where(is_on_device_np, 0, positions_np)
        views["token_ids"][:num_tokens] = self._rows.token_ids_np[
            row_of_token_np, host_positions_np
        ]
        if is_on_device_np.any():
            prev_sampled_idx_np = self._rows.prev_sampled_idx_np[row_of_token_np]
            token_source_np[:num_tokens] = np.where(
                is_on_device_np, prev_sampled_idx_np, self._host_token
            )

    def _check(
        self,
        req_ids: list[str],
        rows_np: np.ndarray,
        num_scheduled_np: np.ndarray,
        seq_lens_np: np.ndarray,
    ) -> None:
        num_tokens_np = self._rows.num_tokens_np[rows_np]
        # Known on the host, and one more if the last step has just sampled it.
        num_available_np = num_tokens_np + (self._rows.prev_sampled_idx_np[rows_np] >= 0)
        is_bad_np = (num_scheduled_np < 1) | (seq_lens_np > num_available_np)
        tables = self._rows.block_tables.tables
        for table, block_size in zip(tables, self._block_sizes, strict=True):
            is_bad_np |= seq_lens_np > table.num_blocks_np[rows_np] * block_size
        if is_bad_np.any():
            bad = int(is_bad_np.argmax())
            num_blocks = [int(table.num_blocks_np[rows_np[bad]]) for table in tables]
            raise InvariantError(
                f"request {req_ids[bad]!r} cannot compute {num_scheduled_np[bad]} tokens up to "
                f"position {seq_lens_np[bad]}: it has {num_available_np[bad]} tokens and "
                f"{num_blocks} blocks of {list(self._block_sizes)} tokens per group."
            )

    def _check_written_blocks(
        self,
        req_ids: list[str],
        req_of_token_np: np.ndarray,  # i32[num_tokens]
        row_of_token_np: np.ndarray,  # i32[num_tokens]
        positions_np: np.ndarray,  # i32[num_tokens]
    ) -> None:
        """No token is written to the null block, whose zeros are copied where memory must be clean.

        Left of a window the table has null blocks, or blocks that the request has given back and
        another may hold by now: attention masks those positions, and no token is written there,
        because the block of a position that is still to be computed never leaves the window.
        """
        tables = self._rows.block_tables.tables
        for group_idx, (table, block_size) in enumerate(
            zip(tables, self._block_sizes, strict=True)
        ):
            block_ids_np = table.block_ids_np[row_of_token_np, positions_np // block_size]
            if not block_ids_np.all():
                bad = int((block_ids_np == 0).argmax())
                raise InvariantError(
                    f"request {req_ids[req_of_token_np[bad]]!r} would write position "
                    f"{positions_np[bad]} to the null block in KV cache group {group_idx}."
                )
