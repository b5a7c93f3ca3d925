"""`InputBatch`: one persistent NumPy row per running request."""

import dataclasses
import heapq

import numpy as np

from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.block_table import BlockTable, MultiGroupBlockTable
from paxkv.runner.sampling_columns import NUM_COLUMNS, encode_sampling_params, seed_of_request
from paxkv.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True)
class CachedRequestState:
    """What the runner keeps of an unfinished request, also while it is preempted."""

    req_id: str
    sampling_params: SamplingParams
    sampling_row_np: np.ndarray  # i32[NUM_COLUMNS]
    row_idx: int | None  # None while it is preempted


class InputBatch:
    """Rows of the running requests; a request keeps its row while it runs.

    Rows may have holes and stay where they are: the batch builder gathers those scheduled in a
    step, so nothing depends on their order, and no row is ever moved (vLLM condenses instead).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_tables: MultiGroupBlockTable,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.requests: dict[str, CachedRequestState] = {}
        self.block_tables = block_tables
        self.token_ids_np = np.zeros((max_num_seqs, max_model_len), np.int32)
        # Tokens whose value the host knows; the one behind them may be on the device still.
        self.num_tokens_np = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_seqs, np.int32)
        self.sampling_rows_np = np.zeros((max_num_seqs, NUM_COLUMNS), np.int32)
        # Place of the row's token among those that the last step sampled; -1 if it sampled none.
        self.prev_sampled_idx_np = np.full(max_num_seqs, -1, np.int32)
        self._free_rows = list(range(max_num_seqs))  # a heap: the lowest free row is taken first
        self._vocab_size = vocab_size
        self._seed = seed

    @classmethod
    def create(
        cls,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks_per_req: int,
        num_groups: int,
        num_blocks: int,
        vocab_size: int,
        seed: int,
    ) -> "InputBatch":
        """An empty batch whose block tables have these dimensions."""
        tables = [
            BlockTable(
                max_num_seqs=max_num_seqs,
                max_blocks_per_req=max_blocks_per_req,
                num_blocks=num_blocks,
            )
            for _ in range(num_groups)
        ]
        return cls(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_tables=MultiGroupBlockTable(tables),
            vocab_size=vocab_size,
            seed=seed,
        )

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the rows to where the scheduler says that its requests are.

        Rows are given back before new ones are taken: a full batch may swap requests in one step.
        """
        for req_id in scheduler_output.finished_req_ids:
            # A request that ended before it first ran was never known here.
            if req_id in self.requests:
                self._release_row(self.requests.pop(req_id))
        for req_id in scheduler_output.preempted_req_ids:
            self._release_row(self._state(req_id))
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        for new_req in scheduler_output.scheduled_new_reqs:
            self._add_new(new_req)

    def rows_of(self, req_ids: list[str]) -> np.ndarray:  # i32[len(req_ids)]
        """Row of each request.

        Raises:
            InvariantError: One is unknown, or preempted.
        """
        rows = [self._state(req_id).row_idx for req_id in req_ids]
        if None in rows:
            raise InvariantError(f"request {req_ids[rows.index(None)]!r} is preempted: no row.")
        return np.array(rows, np.int32)

    def note_sampled(self, rows_np: np.ndarray, is_sampled_np: np.ndarray) -> None:
        """Remembers which rows' next token is among those that a step has just sampled.

        Args:
            rows_np: i32[num_reqs], rows in the order of the step.
            is_sampled_np: bool[num_reqs], which of them it drew a token for.
        """
        self.prev_sampled_idx_np[:] = -1
        step_idx_np = np.arange(len(rows_np), dtype=np.int32)
        self.prev_sampled_idx_np[rows_np] = np.where(is_sampled_np, step_idx_np, -1)

    def append_tokens(self, req_ids: list[str], token_ids: list[int]) -> None:
        """Writes one sampled token behind each request's; a request without a row needs none.

        A preempted request gets all its tokens from the scheduler when it resumes.

        Raises:
            InvariantError: A row is full: the scheduler let a request pass max_model_len.
        """
        rows, kept_token_ids = [], []
        for req_id, token_id in zip(req_ids, token_ids, strict=True):
            state = self.requests.get(req_id)
            if state is not None and state.row_idx is not None:
                rows.append(state.row_idx)
                kept_token_ids.append(token_id)
        rows_np = np.array(rows, np.int32)
        positions_np = self.num_tokens_np[rows_np]
        if (positions_np >= self.token_ids_np.shape[1]).any():
            raise InvariantError(
                f"a request would pass max_model_len={self.token_ids_np.shape[1]}; "
                f"got a token for each of {req_ids}."
            )
        self.token_ids_np[rows_np, positions_np] = kept_token_ids
        self.num_tokens_np[rows_np] += 1

    def _add_new(self, new_req: NewRequestData) -> None:
        if new_req.req_id in self.requests:
            raise InvariantError(f"request {new_req.req_id!r} is new, but known already.")
        params = new_req.sampling_params
        seed = seed_of_request(self._seed, new_req.req_id) if params.seed is None else params.seed
        state = CachedRequestState(
            req_id=new_req.req_id,
            sampling_params=params,
            sampling_row_np=encode_sampling_params(params, seed=seed, vocab_size=self._vocab_size),
            row_idx=None,
        )
        self.requests[new_req.req_id] = state
        self._take_row(state, new_req.prompt_token_ids)
        self.num_computed_tokens_np[state.row_idx] = new_req.num_computed_tokens
        self.block_tables.append_row(state.row_idx, new_req.block_ids)

    def _update_cached(self, cached: CachedRequestData) -> None:
        for req_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._state(req_id)
            if req_id in cached.resumed_req_ids:
                self._release_row(state)
                self._take_row(state, cached.all_token_ids[req_id])
            elif state.row_idx is None:
                raise InvariantError(f"request {req_id!r} runs, but was preempted.")
            self.num_computed_tokens_np[state.row_idx] = num_computed_tokens
            if block_ids is not None:
                self.block_tables.append_row(state.row_idx, block_ids)

    def _take_row(self, state: CachedRequestState, token_ids: list[int]) -> None:
        if not self._free_rows:
            raise InvariantError(f"no row for {state.req_id!r}: {len(self.requests)} requests.")
        if not 1 <= len(token_ids) <= self.token_ids_np.shape[1]:
            raise InvariantError(
                f"request {state.req_id!r} must have 1 to {self.token_ids_np.shape[1]} tokens, "
                f"got {len(token_ids)}."
            )
        row_idx = heapq.heappop(self._free_rows)
        state.row_idx = row_idx
        self.token_ids_np[row_idx, : len(token_ids)] = token_ids
        self.num_tokens_np[row_idx] = len(token_ids)
        self.sampling_rows_np[row_idx] = state.sampling_row_np
        self.prev_sampled_idx_np[row_idx] = -1

    def _release_row(self, state: CachedRequestState) -> None:
        if state.row_idx is None:
            return
        self.block_tables.clear_row(state.row_idx)
        self.num_tokens_np[state.row_idx] = 0
        self.num_computed_tokens_np[state.row_idx] = 0
        self.prev_sampled_idx_np[state.row_idx] = -1
        heapq.heappush(self._free_rows, state.row_idx)
        state.row_idx = None

    def _state(self, req_id: str) -> CachedRequestState:
        if req_id not in self.requests:
            raise InvariantError(f"request {req_id!r} was scheduled, but is unknown to the runner.")
        return self.requests[req_id]
