"""`InputBatch`: one persistent NumPy row per running request."""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.block_table import BlockTable, MultiGroupBlockTable
from paxkv.runner.batch.slot_table import SlotTable
from paxkv.runner.sampling.row_state import pack_row, processors_of
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampling_columns import (
    Processors,
    encode_sampling_params,
    seed_of_request,
)
from paxkv.runner.shapes.packed_layout import MAX_ENDING_IDS
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS, ROW

# Tokens of up to this many steps are collected before they are written into the rows together.
MAX_LATE_STEPS = 32


@dataclasses.dataclass(slots=True)
class CachedRequestState:
    """The runner's data of an unfinished request, kept while the request is preempted."""

    req_id: str
    sampling_params: SamplingParams
    sampling_row_np: np.ndarray  # i32[NUM_COLUMNS]
    ending_ids_np: np.ndarray  # i32[MAX_ENDING_IDS]
    first_end: int  # position of the first drawn token that may end the request
    row_idx: int | None  # None while the request is preempted
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    early_end_ids: tuple[int, ...]
    has_row_state: bool  # whether the device has a `RowState` for it
    needs_grammar: bool
    is_pooled: bool

    @property
    def needs_more_than_tokens(self) -> bool:
        """Whether the request needs log-probabilities or a grammar; features do not count."""
        return self.sampling_params.logprobs is not None or self.needs_grammar


class InputBatch:
    """The rows of the running requests. A request keeps its row while it runs.

    Rows never move, so there may be free rows between used ones (vLLM condenses its rows). The
    batch builder gathers the rows of each step, so their order has no meaning.

    `token_ids_np`, `num_tokens_np` and `num_pending_np` are updated when they are read. Steady
    decode does not read them, and so saves a part of the host's time per step.

    Args:
        keeps_tokens: The device keeps the tokens of all requests in its `RowState`, because it
            finds drafts in them.

    Attributes:
        num_needing_more: Number of requests with a row and `needs_more_than_tokens`.
        num_changes: How often a row was allocated or freed.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_tables: MultiGroupBlockTable,
        vocab_size: int,
        seed: int,
        keeps_tokens: bool,
    ) -> None:
        self.requests: dict[str, CachedRequestState] = {}
        self.block_tables = block_tables
        self._token_ids_np = np.zeros((max_num_seqs, max_model_len), np.int32)
        # Other classes read these through the properties below.
        self._num_tokens_np = np.zeros(max_num_seqs, np.int32)
        self._num_pending_np = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_seqs, np.int32)
        self.sampling_rows_np = np.zeros((max_num_seqs, NUM_COLUMNS), np.int32)
        self.ending_ids_np = np.full((max_num_seqs, MAX_ENDING_IDS), NO_TOKEN, np.int32)
        self.first_end_np = np.zeros(max_num_seqs, np.int32)
        self.is_pooled_np = np.zeros(max_num_seqs, bool)
        # Index of this row's token among the tokens of the last step. -1 if the step drew none, or
        # if only the sampler knows how many it drew.
        self.prev_sampled_idx_np = np.full(max_num_seqs, -1, np.int32)
        # `num_changes` when the row was last allocated or freed. Tokens that were drawn before
        # belong to an earlier request.
        self.changed_at_np = np.zeros(max_num_seqs, np.int64)
        self.num_changes = 0
        self.num_needing_more = 0
        self._free_rows = list(range(max_num_seqs))  # a heap: the lowest free row comes first
        self._vocab_size = vocab_size
        self._seed = seed
        self._keeps_tokens = keeps_tokens
        # Requests that got a row since the last call of `pack_started_rows`, and need a `RowState`.
        self._started: list[CachedRequestState] = []
        # Rows whose block tables changed since the last call of `drain_grown_rows`.
        self._grown_rows: list[int] = []
        # The last result of `rows_of` and the last arguments of `record_drawn`, until a row is
        # allocated or freed. Steps of steady decode ask for the same rows.
        self._found_req_ids: list[str] | None = None
        self._found_rows_np = np.zeros(0, np.int32)
        self._recorded: tuple[np.ndarray, np.ndarray] | None = None
        # Later steps with the same arguments, and their tokens that have arrived.
        self._num_late_steps = 0
        self._late_token_ids: list[np.ndarray] = []

    @classmethod
    def create(
        cls,
        *,
        max_num_seqs: int,
        max_model_len: int,
        tables: Sequence[TableShape],
        num_blocks: int,
        vocab_size: int,
        seed: int,
        keeps_tokens: bool = False,
    ) -> "InputBatch":
        """Makes an empty batch whose block tables have these dimensions."""
        group_tables = [
            (
                SlotTable(
                    table.slot_shape(max_num_seqs),
                    max_num_seqs=max_num_seqs,
                    num_blocks=num_blocks,
                )
                if table.is_state
                else BlockTable(
                    max_num_seqs=max_num_seqs,
                    max_blocks_per_req=table.max_blocks_per_req,
                    num_blocks=num_blocks,
                )
            )
            for table in tables
            for _ in range(table.num_kv_cache_groups)
        ]
        return cls(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_tables=MultiGroupBlockTable(group_tables),
            vocab_size=vocab_size,
            seed=seed,
            keeps_tokens=keeps_tokens,
        )

    @property
    def token_ids_np(self) -> np.ndarray:  # i32[max_num_seqs, max_model_len]
        """Tokens of each row that the host knows."""
        self._settle()
        return self._token_ids_np

    @property
    def num_tokens_np(self) -> np.ndarray:  # i32[max_num_seqs]
        """Number of tokens of each row that the host knows."""
        self._settle()
        return self._num_tokens_np

    @property
    def num_pending_np(self) -> np.ndarray:  # i32[max_num_seqs]
        """Number of tokens of each row that started steps draw and the host does not know yet."""
        self._settle()
        return self._num_pending_np

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the scheduler's decision to the rows.

        Rows are freed before new ones are allocated, because a full batch may replace requests in
        one step.
        """
        self.block_tables.finish_moves()
        for req_id in scheduler_output.finished_req_ids:
            # A request that ended before its first step has no row.
            if req_id in self.requests:
                self._release_row(self.requests.pop(req_id))
        for req_id in scheduler_output.preempted_req_ids:
            self._release_row(self._state(req_id))
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        for new_req in scheduler_output.scheduled_new_reqs:
            self.add_new(new_req)

    def pack_started_rows(self) -> list[np.ndarray]:  # i32[num_row_words] each
        """Packs rows of the `RowState` for requests that started since the last call."""
        started, self._started = self._started, []
        return [
            pack_row(
                state.row_idx,
                self.token_ids_np[state.row_idx, : self.num_tokens_np[state.row_idx]],
                state.sampling_params,
                bad_words_token_ids=state.bad_words_token_ids,
                early_end_ids=state.early_end_ids,
                max_model_len=self._token_ids_np.shape[1],
                vocab_size=self._vocab_size,
            )
            for state in started
        ]

    def drain_grown_rows(self) -> list[int]:
        """Returns rows whose block tables changed since the last call, including new rows."""
        grown, self._grown_rows = self._grown_rows, []
        return grown

    def rows_of(self, req_ids: list[str]) -> np.ndarray:  # i32[len(req_ids)]
        """Returns the row of each request, read-only; the same array as before if nothing changed.

        Raises:
            InvariantError: A request is unknown or preempted.
        """
        if req_ids != self._found_req_ids:
            rows = [self._state(req_id).row_idx for req_id in req_ids]
            if None in rows:
                raise InvariantError(
                    f"request {req_ids[rows.index(None)]!r} was scheduled, but has no row: it was "
                    "preempted."
                )
            self._found_req_ids, self._found_rows_np = req_ids, np.array(rows, np.int32)
            self._found_rows_np.setflags(write=False)
        return self._found_rows_np

    def record_drawn(
        self,
        rows_np: np.ndarray,  # i32[num_reqs], rows in the order of the step
        num_drawn_np: np.ndarray,  # i32[num_reqs], tokens that the step draws for each row
        num_drafts_np: np.ndarray | None = None,  # i32[num_reqs], drafts that it verifies for each
    ) -> None:
        """Records how many tokens each request draws in the step that has just been started.

        A request with drafts may get fewer tokens than `num_drawn_np`. No other step may compute
        its next token before the host has fetched them.
        """
        recorded = self._recorded
        if recorded is not None and recorded[0] is rows_np and recorded[1] is num_drawn_np:
            self._num_late_steps += 1
            return
        self._settle()
        self.prev_sampled_idx_np[:] = -1
        step_idx_np = np.arange(len(rows_np), dtype=np.int32)
        is_known_np = num_drawn_np > 0
        if num_drafts_np is not None:
            is_known_np &= num_drafts_np == 0
        self.prev_sampled_idx_np[rows_np] = np.where(is_known_np, step_idx_np, -1)
        self._num_pending_np[rows_np] += num_drawn_np
        self._recorded = (rows_np, num_drawn_np)

    def append_tokens(
        self,
        rows_np: np.ndarray,  # i32[num_reqs], each once
        drawn_np: np.ndarray,  # i32[max_steps, num_reqs], NO_TOKEN after the last of each request
        num_drawn_np: np.ndarray,  # i32[num_reqs], the argument of `record_drawn`
    ) -> None:
        """Appends a step's tokens to the rows. There may be fewer tokens than `num_drawn_np`.

        Raises:
            InvariantError: A row is full: the scheduler let a request exceed max_model_len.
        """
        self._settle()
        num_new_np = (drawn_np != NO_TOKEN).sum(axis=0, dtype=np.int32)
        self._check_room(rows_np, num_new_np)
        for tokens_np in drawn_np[: num_new_np.max(initial=0)]:
            has_token_np = tokens_np != NO_TOKEN
            kept_rows_np = rows_np[has_token_np]
            self._token_ids_np[kept_rows_np, self._num_tokens_np[kept_rows_np]] = tokens_np[
                has_token_np
            ]
            self._num_tokens_np[kept_rows_np] += 1
        self._num_pending_np[rows_np] -= num_drawn_np

    def append_one_each(
        self,
        rows_np: np.ndarray,  # i32[num_reqs], each once
        token_ids_np: np.ndarray,  # i32[num_reqs]
    ) -> None:
        """Appends the tokens of a step that drew one token for each request.

        Raises:
            InvariantError: As `append_tokens`.
        """
        if self._recorded is None or self._recorded[0] is not rows_np:
            self.append_tokens(rows_np, token_ids_np[None], np.ones(len(rows_np), np.int32))
            return
        self._late_token_ids.append(token_ids_np.copy())
        if len(self._late_token_ids) >= MAX_LATE_STEPS:
            self._settle()

    def _settle(self) -> None:
        """Writes collected tokens and counts into the rows.

        Every method that reads tokens or their counts, allocates a row, or frees one, calls it.

        Raises:
            InvariantError: As `append_tokens`.
        """
        if self._num_late_steps == 0 and not self._late_token_ids:
            return
        rows_np, num_drawn_np = self._recorded
        self._num_pending_np[rows_np] += self._num_late_steps * num_drawn_np
        late, self._late_token_ids, self._num_late_steps = self._late_token_ids, [], 0
        if late:
            self._check_room(rows_np, np.full(len(rows_np), len(late), np.int32))
            places_np = self._num_tokens_np[rows_np, None] + np.arange(len(late), dtype=np.int32)
            self._token_ids_np[rows_np[:, None], places_np] = np.stack(late, axis=1)
            self._num_tokens_np[rows_np] += len(late)
            self._num_pending_np[rows_np] -= len(late)

    def _check_room(self, rows_np: np.ndarray, num_new_np: np.ndarray) -> None:
        ends_np = self._num_tokens_np[rows_np] + num_new_np
        max_model_len = self._token_ids_np.shape[1]
        if (ends_np > max_model_len).any():
            raise InvariantError(
                f"a request would be longer than max_model_len={max_model_len}: rows "
                f"{rows_np.tolist()} got {num_new_np.tolist()} tokens and would have "
                f"{ends_np.tolist()}."
            )

    def add_new(self, new_req: NewRequestData) -> None:
        """Allocates a row for a request. `update` calls it for new requests."""
        if new_req.req_id in self.requests:
            raise InvariantError(f"request {new_req.req_id!r} was added before.")
        params = new_req.sampling_params
        seed = seed_of_request(self._seed, new_req.req_id) if params.seed is None else params.seed
        processors = processors_of(
            params, new_req.bad_words_token_ids, needs_grammar=new_req.needs_grammar
        )
        if self._keeps_tokens:
            processors |= Processors.TOKEN_HISTORY
        state = CachedRequestState(
            req_id=new_req.req_id,
            sampling_params=params,
            sampling_row_np=encode_sampling_params(
                params,
                seed=seed,
                vocab_size=self._vocab_size,
                num_prompt_tokens=len(new_req.prompt_token_ids),
                processors=processors,
            ),
            ending_ids_np=_first_ending_ids(new_req.ending_token_ids),
            first_end=len(new_req.prompt_token_ids) + params.min_tokens - 1,
            row_idx=None,
            bad_words_token_ids=new_req.bad_words_token_ids,
            early_end_ids=new_req.early_end_ids,
            # Each step brings the grammar's mask, and showing logits needs no state.
            has_row_state=(
                bool(processors & ~(Processors.GRAMMAR | Processors.SHOWN)) or params.min_tokens > 0
            ),
            needs_grammar=new_req.needs_grammar,
            is_pooled=new_req.is_pooled,
        )
        self.requests[new_req.req_id] = state
        self._allocate_row(state, new_req.prompt_token_ids)
        self.num_computed_tokens_np[state.row_idx] = new_req.num_computed_tokens
        self.block_tables.append_row(state.row_idx, new_req.block_ids)

    def _update_cached(self, cached: CachedRequestData) -> None:
        if cached.resumed_req_ids:
            # In the order of the step: the order of a set of strings differs between processes.
            for req_id in cached.req_ids:
                if req_id in cached.resumed_req_ids:
                    state = self._state(req_id)
                    self._release_row(state)
                    self._allocate_row(state, cached.all_token_ids[req_id])
        if not cached.req_ids:
            return
        rows_np = self.rows_of(cached.req_ids)
        self.num_computed_tokens_np[rows_np] = cached.num_computed_tokens
        grown = [idx for idx, new in enumerate(cached.new_block_ids) if new is not None]
        if grown:
            rows = rows_np[grown].tolist()
            self.block_tables.append_rows(rows, [cached.new_block_ids[idx] for idx in grown])
            self._grown_rows += rows

    def _allocate_row(self, state: CachedRequestState, token_ids: list[int]) -> None:
        if not self._free_rows:
            raise InvariantError(
                f"no row is free for request {state.req_id!r}: {len(self.requests)} requests."
            )
        if not 1 <= len(token_ids) <= self._token_ids_np.shape[1]:
            raise InvariantError(
                f"request {state.req_id!r} must have 1 to {self._token_ids_np.shape[1]} tokens, "
                f"got {len(token_ids)}."
            )
        self._settle()
        row_idx = heapq.heappop(self._free_rows)
        state.row_idx = row_idx
        self._token_ids_np[row_idx, : len(token_ids)] = token_ids
        self._num_tokens_np[row_idx] = len(token_ids)
        self._num_pending_np[row_idx] = 0
        self.sampling_rows_np[row_idx] = state.sampling_row_np
        self.sampling_rows_np[row_idx, ROW] = row_idx
        if state.has_row_state:
            self._started.append(state)
        self.ending_ids_np[row_idx] = state.ending_ids_np
        self.first_end_np[row_idx] = state.first_end
        self.is_pooled_np[row_idx] = state.is_pooled
        self.prev_sampled_idx_np[row_idx] = -1
        self._record_change(state, row_idx, 1)

    def _release_row(self, state: CachedRequestState) -> None:
        if state.row_idx is None:
            return
        self._settle()
        self.block_tables.clear_row(state.row_idx)
        self._num_tokens_np[state.row_idx] = 0
        self._num_pending_np[state.row_idx] = 0
        self.num_computed_tokens_np[state.row_idx] = 0
        self.prev_sampled_idx_np[state.row_idx] = -1
        heapq.heappush(self._free_rows, state.row_idx)
        self._record_change(state, state.row_idx, -1)
        state.row_idx = None

    def _record_change(self, state: CachedRequestState, row_idx: int, num_rows: int) -> None:
        self.num_changes += 1
        self.changed_at_np[row_idx] = self.num_changes
        self.num_needing_more += num_rows * state.needs_more_than_tokens
        self._found_req_ids = self._recorded = None

    def _state(self, req_id: str) -> CachedRequestState:
        if req_id not in self.requests:
            raise InvariantError(f"request {req_id!r} was scheduled, but is unknown to the runner.")
        return self.requests[req_id]


def _first_ending_ids(token_ids: tuple[int, ...]) -> np.ndarray:  # i32[MAX_ENDING_IDS]
    """Returns the first `MAX_ENDING_IDS`. The scheduler ends the request at the other tokens."""
    ending_ids_np = np.full(MAX_ENDING_IDS, NO_TOKEN, np.int32)
    kept = token_ids[:MAX_ENDING_IDS]
    ending_ids_np[: len(kept)] = kept
    return ending_ids_np
