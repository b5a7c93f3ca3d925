"""`DeviceStep`: a step that has been started; fetches its tokens and writes them into the rows."""

import collections
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from paxkv.config.sampling_params import is_wide
from paxkv.contracts.executor import GrammarBitmask
from paxkv.contracts.scheduler_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ModelRunnerOutput,
    TokenLogprobs,
)
from paxkv.errors import InvariantError
from paxkv.runner.batch.built_step import BuiltStep
from paxkv.runner.batch.input_batch import CachedRequestState, InputBatch
from paxkv.runner.features.base import StepFeature
from paxkv.runner.sampling.logits_check import LogitsCheck
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH, read_logprobs
from paxkv.runner.sampling.wide_logprobs import append_logits
from paxkv.runner.shapes.program_shapes import BurstShape
from paxkv.runner.shapes.step_variant import StepVariant


class FinishedStep:
    """A step without scheduled tokens."""

    needs_bitmask = False
    is_done = True

    def __init__(self, features: Sequence[StepFeature] = ()) -> None:
        self._features = features

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        raise InvariantError("a step without tokens takes no grammar bitmask.")

    def sample_tokens(self) -> ModelRunnerOutput:
        output = EMPTY_MODEL_RUNNER_OUTPUT
        for feature in self._features:
            output = feature.finish_empty(output)
        return output


class DeviceStep:
    """A step that the device is computing, or has computed.

    Attributes:
        result: i32[max_steps or max_draws, num_reqs, RESULT_WIDTH], on the device; None before its
            tokens are drawn, and after they were fetched. Bursts with drafts have one more column.
        feature_results: Results of step features on the device, by variant and by name.
        drafts: i32[num_reqs, num_drafts], proposals of a draft head for the next step, on the
            device; `NO_TOKEN` after the last one of a request. None without a head.
        grammar_rows: For each request that draws tokens which a grammar binds, its rows of logits.
    """

    def __init__(
        self, *, built: BuiltStep, rows: InputBatch, logits_check: LogitsCheck | None = None
    ) -> None:
        self.result: jax.Array | None = None
        self.drafts: jax.Array | None = None
        self.feature_results: dict[StepVariant, Mapping[str, jax.Array]] = {}
        self._logits_np: np.ndarray | None = None
        self._built = built
        self._rows = rows
        self._logits_check = logits_check
        # When the tokens arrive, a request may have ended and its row may belong to another
        # request. Or the request may have lost its row and got one again.
        self._num_row_changes = rows.num_changes
        # None if no request needs more than tokens. Read now, because another request may have the
        # same id when the tokens arrive.
        self._states = (
            [rows.requests[req_id] for req_id in built.req_ids] if rows.num_needing_more else None
        )
        self.grammar_rows: dict[str, range] = {
            state.req_id: range(first, first + num_drawn)
            for state, first, num_drawn in zip(
                self._states or [],
                built.first_draw_np.tolist() if self._states else [],
                built.num_drawn_np.tolist() if self._states else [],
                strict=True,
            )
            if state.needs_grammar and num_drawn > 0
        }
        self._draw: Callable[[np.ndarray], jax.Array] | None = None
        self._mask_dims = (0, 0)

    @property
    def needs_bitmask(self) -> bool:
        return self._draw is not None

    @property
    def is_done(self) -> bool:
        """See `StepHandle.is_done`."""
        return self.result is not None and self.result.is_ready()

    def wait_for_bitmask(
        self,
        draw: Callable[[np.ndarray], jax.Array],
        mask_dims: tuple[int, int],  # num_rows, 1 + vocab_words
    ) -> None:
        """Makes `start_sampling` call `draw` with the rows of all grammars."""
        self._draw, self._mask_dims = draw, mask_dims

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        """See `StepHandle.start_sampling`."""
        if self._draw is None:
            raise InvariantError("the step needs no grammar bitmask, or already has it.")
        req_ids, bitmask_np = grammar_bitmask.req_ids, grammar_bitmask.bitmask_np
        dims = (len(req_ids), self._mask_dims[1] - 1)
        wanted = {req_id: len(rows) for req_id, rows in self.grammar_rows.items()}
        if collections.Counter(req_ids) != wanted or bitmask_np.shape != dims:
            raise InvariantError(
                f"a step's bitmask must have {dims[1]} words in a row, and as many rows per "
                f"request as {wanted}; got rows of {sorted(req_ids)} and shape {bitmask_np.shape}."
            )
        mask_np = np.zeros(self._mask_dims, np.int32)
        next_rows = {req_id: iter(rows) for req_id, rows in self.grammar_rows.items()}
        rows = [next(next_rows[req_id]) for req_id in req_ids]
        mask_np[rows, 0] = 1
        mask_np[rows, 1:] = bitmask_np
        draw, self._draw = self._draw, None
        self.result = draw(mask_np)

    def fetch_logits(
        self,
        logits: jax.Array,  # f32[num_rows, vocab]
    ) -> None:
        """Copies the step's logits to the host, if a request asks for many log-probabilities.

        Must be called before the next step starts, which overwrites the logits.
        """
        states = [self._rows.requests[req_id] for req_id in self._built.req_ids]
        if any(is_wide(state.sampling_params.logprobs) for state in states):
            self._logits_np = jax.device_get(logits).copy()

    def sample_tokens(self) -> ModelRunnerOutput:
        """Waits for the device, fetches the tokens and writes them into the rows.

        Raises:
            InvariantError: The tokens were fetched before, or the step waits for `start_sampling`.
        """
        if self._draw is not None:
            raise InvariantError("the step waits for its bitmask: call `start_sampling` first.")
        if self.result is None:
            raise InvariantError("the tokens of this step were fetched before.")
        result_np, self.result = _fetch(self.result), None
        for feature in self._built.features:
            feature.record_tokens()
        if self._logits_np is not None:
            result_np = append_logits(result_np, self._logits_np, self._built.first_draw_np)
        req_ids = self._built.req_ids
        if self._logits_check is not None:
            num_drawn_np, unfinished = self._built.num_drawn_np, self._rows.requests.keys()
            self._logits_check.count(req_ids, num_drawn_np, result_np, unfinished=unfinished)
        sampled_token_ids = self._write_tokens(result_np)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=sampled_token_ids,
            logprobs=(
                [None] * len(req_ids)
                if self._states is None
                else [
                    self._read_logprobs(state, result_np[: len(token_ids), req_idx])
                    for req_idx, (state, token_ids) in enumerate(
                        zip(self._states, sampled_token_ids, strict=True)
                    )
                ]
            ),
            draft_token_ids=self._take_drafts(sampled_token_ids),
            burst_drafts=self._read_burst_drafts(result_np, sampled_token_ids),
        )
        for feature in self._built.features:
            results = self.feature_results.pop(feature.variant, {})
            found = {name: _fetch(array) for name, array in results.items()}
            output = feature.finish(output, found)
        return output

    def _write_tokens(
        self,
        result_np: np.ndarray,  # i32[max_steps or max_draws, num_reqs, RESULT_WIDTH]
    ) -> list[list[int]]:
        """Writes the tokens into the rows that still wait for them, and returns them by request."""
        rows_np, num_drawn_np = self._built.rows_np, self._built.num_drawn_np
        num_reqs = len(rows_np)
        if self._built.num_drawn_of_each == 1:
            token_ids_np = result_np[0, :num_reqs, 0]
            if self._rows.num_changes == self._num_row_changes:
                self._rows.append_one_each(rows_np, token_ids_np)
            else:
                kept_np = self._are_kept()
                self._rows.append_one_each(rows_np[kept_np], token_ids_np[kept_np])
            return token_ids_np[:, None].tolist()
        drawn_np = result_np[: num_drawn_np.max(), :num_reqs, 0]
        # A request with fewer draws than others drew nothing in the last steps of the burst.
        step_idx_np = np.arange(len(drawn_np), dtype=np.int32)[:, None]
        drawn_np = np.where(step_idx_np < num_drawn_np, drawn_np, NO_TOKEN)
        kept_np = self._are_kept()
        self._rows.append_tokens(rows_np[kept_np], drawn_np[:, kept_np], num_drawn_np[kept_np])
        return [
            [token_id for token_id in row if token_id != NO_TOKEN] for row in drawn_np.T.tolist()
        ]

    def _take_drafts(self, sampled_token_ids: list[list[int]]) -> dict[str, list[int]]:
        """Fetches the proposals of the draft head, for the requests that drew tokens."""
        if self.drafts is None:
            return {}
        drafts = _fetch(self.drafts)[: len(sampled_token_ids)].tolist()
        self.drafts = None
        return {
            req_id: [draft_id for draft_id in draft_ids if draft_id != NO_TOKEN]
            for req_id, token_ids, draft_ids in zip(
                self._built.req_ids, sampled_token_ids, drafts, strict=True
            )
            if token_ids
        }

    def _read_burst_drafts(
        self,
        result_np: np.ndarray,  # i32[max_steps, num_reqs, RESULT_WIDTH + 1]
        sampled_token_ids: list[list[int]],
    ) -> dict[str, list[tuple[int, int]]]:
        """Returns `ModelRunnerOutput.burst_drafts`. See `DraftingState.results`."""
        shape = self._built.shape
        if not isinstance(shape, BurstShape) or shape.drafts is None:
            return {}
        found: dict[str, list[tuple[int, int]]] = {}
        columns = result_np[:, :, RESULT_WIDTH].T.tolist()
        for req_id, token_ids, column in zip(
            self._built.req_ids, sampled_token_ids, columns, strict=False
        ):
            starts = [place for place, word in enumerate(column[: len(token_ids)]) if word > 0]
            ends = [*starts[1:], len(token_ids)]
            steps = [
                (column[start] - 1, end - start - 1)
                for start, end in zip(starts, ends, strict=False)
                if column[start] > 1
            ]
            if steps:
                found[req_id] = steps
        return found

    def _are_kept(self) -> np.ndarray:  # bool[num_reqs]
        """Returns, for each request, whether it still has the row that it had in the step.

        A preempted request gets all its tokens from the scheduler when it resumes.
        """
        return self._rows.changed_at_np[self._built.rows_np] <= self._num_row_changes

    def _read_logprobs(
        self,
        state: CachedRequestState,
        result_rows_np: np.ndarray,  # i32[num_tokens, RESULT_WIDTH]
    ) -> list[TokenLogprobs] | None:
        num_logprobs = state.sampling_params.logprobs
        if num_logprobs is None:
            return None
        return [read_logprobs(result_row_np, num_logprobs) for result_row_np in result_rows_np]


def _fetch(array: jax.Array) -> np.ndarray:
    """Waits for an array and copies it to the host; `device_get` would be slower."""
    # Other code runs under a guard that forbids such copies.
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)
