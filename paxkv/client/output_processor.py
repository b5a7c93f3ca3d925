"""`OutputProcessor`: turns the token ids of steps into text and checks stop strings."""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable

from paxkv.client.packed_logprobs import PackedLogprobs
from paxkv.client.parallel_sampling import OutputKind, ParentRequest, PromptLogprobs
from paxkv.client.token_counter import TokenCounter, sum_totals
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    FinishReason,
    RequestTimes,
    StepOutputs,
)
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import (
    CompletionOutput,
    CompletionTimes,
    Logprob,
    RequestOutput,
    RequestStateStats,
    TokenTotals,
)
from paxkv.contracts.scheduler_output import TokenLogprobs
from paxkv.errors import EngineDeadError, InvariantError, PaxkvError
from paxkv.text.detokenizer import IncrementalDetokenizer
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedOutputs:
    """The result of processing a step or an abort.

    Args:
        request_outputs: At most one per caller's request, in the step's order.
        request_ids_to_abort: Engine requests that the client must abort, because their output has
            ended before the engine ended them, or because the blocks they keep are not needed.
        errors: Caller's request id -> the error that ended the request: its text could not be
            built, or its engine ended.
    """

    request_outputs: list[RequestOutput]
    request_ids_to_abort: list[str]
    errors: dict[str, PaxkvError] = dataclasses.field(default_factory=dict)


class OutputProcessor:
    """Holds the output state of every unfinished request.

    Args:
        tokenizer: If None, every text is empty.
        num_engines: Number of engines; `StepOutputs.engine_idx` is less than it.
        packs_logprobs: Store the log-probabilities of "final_only" outputs as `PackedLogprobs`
            instead of lists, because such an answer may hold them for minutes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        num_engines: int = 1,
        packs_logprobs: bool = False,
    ) -> None:
        self._packs_logprobs = packs_logprobs
        self._tokenizer = tokenizer
        # By the caller's request id.
        self._parents: dict[str, ParentRequest] = {}
        # By the engine's request id.
        self._completions: dict[str, _CompletionState] = {}
        self._token_counters = [TokenCounter() for _ in range(num_engines)]

    @property
    def token_totals(self) -> TokenTotals:
        """Tokens that steps have delivered so far, including unfinished requests."""
        return sum_totals([counter.totals for counter in self._token_counters])

    @property
    def num_unfinished_requests(self) -> int:
        """Number of callers' unfinished requests."""
        return len(self._parents)

    def add_request(
        self, request: EngineRequest, *, prompt: str | None, output_kind: OutputKind
    ) -> list[EngineRequest]:
        """Registers a request.

        Args:
            prompt: The prompt as text; None if it was sent as token ids.

        Returns:
            The requests to send to the engine: one per completion.
        """
        if request.request_id in self._parents:
            raise InvariantError(f"request {request.request_id!r} was added twice.")
        parent = ParentRequest(request, prompt=prompt, output_kind=output_kind)
        for index, child in enumerate(parent.children):
            self._completions[child.request_id] = _CompletionState(
                child,
                parent=parent,
                index=index,
                output_kind=output_kind,
                tokenizer=self._tokenizer,
                packs_logprobs=self._packs_logprobs and output_kind == "final_only",
            )
        self._parents[request.request_id] = parent
        return parent.children

    def process(self, step_outputs: StepOutputs) -> ProcessedOutputs:
        """Turns one step's outputs into text and removes finished requests."""
        request_ids_to_abort = []
        errors: dict[str, PaxkvError] = {}
        parents: dict[str, ParentRequest] = {}
        # The argument of `TokenCounter.count_step`. Most consecutive outputs have equal keys, so
        # `run_length` counts such a run before it is added.
        num_completions: dict[tuple[int, float | None], int] = defaultdict(int)
        run_key, run_length = (0, None), 0
        request_times, now_s = step_outputs.request_times, step_outputs.monotonic_s
        token_counter = self._token_counters[step_outputs.engine_idx]
        for output in step_outputs.outputs:
            state = self._completions.get(output.request_id)
            # A stop string, or an abort during this step, has already ended the completion.
            if state is None:
                continue
            parent = state.parent
            parents[parent.request_id] = parent
            num_new_tokens, last_token_s = len(output.new_token_ids), state.last_token_s
            if num_new_tokens > 0:
                if num_new_tokens != run_key[0] or last_token_s != run_key[1]:
                    num_completions[run_key] += run_length
                    run_key, run_length = (num_new_tokens, last_token_s), 0
                run_length += 1
                if last_token_s is None and state.counts_prompt:
                    token_counter.count_prompt(state.num_prompt_tokens, output.num_cached_tokens)
            if request_times:
                state.record_first_token(step_outputs)
            try:
                state.process(output, now_s)
            # End only this request; the other requests of the step continue.
            except Exception as error:
                del parents[parent.request_id]
                errors[parent.request_id] = _failure(parent.request_id, error)
                request_ids_to_abort += self._remove(parent)
                continue
            if state.finish_reason is not None:
                del self._completions[output.request_id]
                if output.finish_reason is None:
                    request_ids_to_abort.append(output.request_id)
        num_completions[run_key] += run_length
        token_counter.count_step(num_completions, now_s)
        return self._collect_outputs(parents.values(), request_ids_to_abort, errors)

    def _collect_outputs(
        self,
        parents: Iterable[ParentRequest],
        request_ids_to_abort: list[str],
        errors: dict[str, PaxkvError],
    ) -> ProcessedOutputs:
        """Builds the result of a step from the parents' outputs; extends the other arguments."""
        request_outputs = []
        for parent in parents:
            try:
                request_output = parent.pop_output()
            except Exception as error:
                errors[parent.request_id] = _failure(parent.request_id, error)
                request_ids_to_abort += self._remove(parent)
                continue
            if request_output is not None:
                request_outputs.append(request_output)
            request_ids_to_abort += parent.pop_released_ids()
            if parent.is_finished:
                del self._parents[parent.request_id]
        return ProcessedOutputs(
            request_outputs=request_outputs,
            request_ids_to_abort=request_ids_to_abort,
            errors=errors,
        )

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Ends callers' requests; returns their last outputs and the engine requests to abort.

        Ignores unknown and finished ids.
        """
        request_outputs = []
        request_ids_to_abort = []
        errors: dict[str, PaxkvError] = {}
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is None:
                continue
            children = [self._completions.get(child.request_id) for child in parent.children]
            request_ids_to_abort += self._remove(parent)
            try:
                for state in children:
                    if state is not None:
                        state.abort()
                request_outputs.append(parent.pop_output())
            # Continue, because the engine must still receive the aborts.
            except Exception as error:
                errors[request_id] = _failure(request_id, error)
        return ProcessedOutputs(
            request_outputs=request_outputs,
            request_ids_to_abort=request_ids_to_abort,
            errors=errors,
        )

    def end_with_engine(self, dead: EngineDead) -> ProcessedOutputs:
        """Ends the requests of a dead engine with an error, while other engines continue.

        Ignores unknown ids: these requests have ended already.
        """
        parents = {}
        for request_id in dead.request_ids or ():
            state = self._completions.get(request_id)
            if state is not None:
                parents[state.parent.request_id] = state.parent
        text = (
            f"the engine of this request has ended: {dead.reason.rstrip('.')}. Others go on: send "
            "the request again."
        )
        return ProcessedOutputs(
            request_outputs=[],
            # Other completions of the request may run on other engines, unless they are forks.
            request_ids_to_abort=[i for parent in parents.values() for i in self._remove(parent)],
            errors={i: EngineDeadError(text, retry_after_s=dead.retry_after_s) for i in parents},
        )

    def _remove(self, parent: ParentRequest) -> list[str]:
        """Removes a request; returns its engine requests, which the client must abort."""
        del self._parents[parent.request_id]
        for child in parent.children:
            self._completions.pop(child.request_id, None)
        return [child.request_id for child in parent.children]


def _failure(request_id: str, error: Exception) -> InvariantError:
    logger.error("building the output of request %r failed", request_id, exc_info=error)
    return InvariantError(
        f"building the output of request {request_id!r} failed: {type(error).__name__}: {error}"
    )


class _CompletionState:
    """The output so far of one completion, which is one engine request."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        parent: ParentRequest,
        index: int,
        output_kind: OutputKind,
        tokenizer: Tokenizer | None,
        packs_logprobs: bool,
    ) -> None:
        self.parent = parent
        # Metrics count a prompt once: only for its first completion, and not for forks.
        self.counts_prompt = index == 0 and request.fork_from is None
        self._request_id = request.request_id
        self._arrival_time = request.arrival_time
        self._times: RequestTimes | None = None
        self._first_token_time = 0.0  # since the epoch
        # On the engine's monotonic clock. `last_token_s` is None before the first token.
        self._first_token_s = 0.0
        self.last_token_s: float | None = None
        self._index = index
        self._is_final_only = output_kind == "final_only"
        self._is_delta = output_kind == "delta"
        self._tokenizer = tokenizer
        self._prompt_token_ids = request.prompt_token_ids
        self._include_stop_str = request.sampling_params.include_stop_str_in_output
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and request.sampling_params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, request.sampling_params
            )
        has_logprobs = request.sampling_params.logprobs is not None
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | PackedLogprobs | None = None
        if has_logprobs:
            self._logprobs = PackedLogprobs() if packs_logprobs else []
        self._cumulative_logprob: float | None = 0.0 if has_logprobs else None
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
        # Tokens in earlier outputs of kind "delta".
        self._num_delivered_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def record_first_token(self, step_outputs: StepOutputs) -> None:
        """Stores the times that arrive with the first token."""
        times = step_outputs.request_times.get(self._request_id)
        if times is not None:
            self._times, self._first_token_time = times, step_outputs.timestamp
            self._first_token_s = step_outputs.monotonic_s

    def process(self, output: EngineCoreOutput, now_s: float) -> None:
        """Processes one step's output and passes the result to the parent."""
        if output.prompt_logprobs is not None:
            self.parent.set_prompt_logprobs(self._to_prompt_logprobs(output.prompt_logprobs))
        new_token_ids = output.new_token_ids
        if new_token_ids:
            self.last_token_s = now_s
        self._num_cached_tokens = output.num_cached_tokens
        self._num_preemptions = output.num_preemptions
        self._num_draft_tokens += output.num_draft_tokens
        self._num_accepted_tokens += output.num_accepted_tokens
        self.finish_reason = output.finish_reason
        self._stop_reason = output.stop_reason
        if self._detokenizer is not None:
            new_token_ids = self._detokenize(output)
        self._token_ids += new_token_ids
        if self._logprobs is not None and output.logprobs is not None:
            for token_id, logprobs in zip(new_token_ids, output.logprobs, strict=False):
                self._logprobs.append(self._to_logprobs(token_id, logprobs))
                self._cumulative_logprob += logprobs.token_logprob
        is_silent = self._is_final_only and self.finish_reason is None
        completion = None if is_silent else self._make_output()
        self.parent.record_step(self._index, completion, num_cached_tokens=self._num_cached_tokens)

    def abort(self) -> None:
        """Ends the completion and passes its output so far to the parent."""
        self.finish_reason, self._stop_reason = "abort", None
        if self._detokenizer is not None:
            self._detokenizer.update([], is_last=True)
        self.parent.record_step(
            self._index, self._make_output(), num_cached_tokens=self._num_cached_tokens
        )

    def _detokenize(self, output: EngineCoreOutput) -> list[int]:
        """Detokenizes the new tokens; returns the tokens up to the end of a stop string."""
        token_ids = output.new_token_ids
        # A token that ends the request belongs to the output's token ids, but not to its text.
        is_ended_by_token = (
            output.finish_reason == "stop"
            and not isinstance(output.stop_reason, str)
            and not self._include_stop_str
        )
        num_text_tokens = len(token_ids) - (1 if is_ended_by_token else 0)
        stopped = self._detokenizer.update(
            token_ids[: max(num_text_tokens, 0)], is_last=output.finish_reason is not None
        )
        if stopped is None:
            return token_ids
        self.finish_reason, self._stop_reason = "stop", stopped.stop_string
        return token_ids[: stopped.num_tokens]

    def _to_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> PromptLogprobs:
        """One entry per prompt token; None for the first, which has no preceding tokens."""
        following = zip(self._prompt_token_ids[1:], logprobs, strict=True)
        return [None, *(self._to_logprobs(token_id, found) for token_id, found in following)]

    def _to_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        """The sampled token first, then the most likely ones."""
        found = {token_id: self._to_logprob(token_id, logprobs.token_logprob, logprobs.token_rank)}
        tops = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        for rank, (top_token_id, top_logprob) in enumerate(tops, start=1):
            found.setdefault(top_token_id, self._to_logprob(top_token_id, top_logprob, rank))
        return found

    def _to_logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token_id) if self._tokenizer is not None else ""
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)

    def _make_output(self) -> CompletionOutput:
        if self._is_delta:
            first = self._num_delivered_tokens
            self._num_delivered_tokens = len(self._token_ids)
            logprobs = self._logprobs
            # Drop delivered log-probabilities, which may take hundreds of megabytes per answer.
            self._logprobs = None if logprobs is None else []
            text = self._detokenizer.drain_new_text() if self._detokenizer is not None else ""
        else:
            first = 0
            # Copy a list, which may grow. `PackedLogprobs` occur only in final outputs.
            is_list = isinstance(self._logprobs, list)
            logprobs = list(self._logprobs) if is_list else self._logprobs
            text = self._detokenizer.text if self._detokenizer is not None else ""
        times = None if self.finish_reason is None else self._completion_times()
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self._token_ids[first:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            times=times,
            metrics=None if times is None else self._metrics(times),
            num_preemptions=self._num_preemptions,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def _completion_times(self) -> CompletionTimes | None:
        if self._times is None or self.last_token_s is None:
            return None
        return CompletionTimes(
            queue_s=self._times.queue_s,
            prefill_s=self._times.prefill_s,
            decode_s=self.last_token_s - self._first_token_s,
            # Wall clocks of two processes; a clock change must not make the result negative.
            first_token_s=max(self._first_token_time - self._arrival_time, 0.0),
        )

    def _metrics(self, times: CompletionTimes) -> RequestStateStats:
        scheduled_ts = self._first_token_s - times.prefill_s
        return RequestStateStats(
            num_generation_tokens=len(self._token_ids),
            arrival_time=self._arrival_time,
            queued_ts=scheduled_ts - times.queue_s,
            scheduled_ts=scheduled_ts,
            first_token_ts=self._first_token_s,
            last_token_ts=self._first_token_s + times.decode_s,
            first_token_latency=times.first_token_s,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )
