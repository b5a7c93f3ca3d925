"""`EngineCore`: steps and messages, between a deciding scheduler and a computing executor."""

import bisect
import dataclasses
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from paxkv.contracts.engine_output import (
    STEP_TOKEN_BUCKETS,
    EngineCoreOutput,
    EngineOutput,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineRequest,
    Shutdown,
    UtilityCall,
)
from paxkv.contracts.executor import Executor, StepHandle
from paxkv.contracts.observation import KVEventBatch
from paxkv.contracts.protocols import Scheduler
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.engine.burst_pacer import BurstPacer
from paxkv.engine.grammar_steps import advance_grammars, drawing_requests
from paxkv.engine.kv_event_publisher import KVEventPublisher
from paxkv.engine.request_clock import RequestClock
from paxkv.errors import InvalidRequestError, InvariantError, PaxkvError
from paxkv.inspector.inspected_scheduler import InspectedScheduler
from paxkv.inspector.recorder import InspectionRecorder
from paxkv.structured_output.grammar_manager import GrammarManager

logger = logging.getLogger(__name__)

# The scheduler promises a token to someone in every step, unless all wait for something outside;
# so many steps without one would never end.
MAX_EMPTY_STEPS = 8
# A step that can only wait for something outside lets it have the interpreter.
_WAIT_S = 0.001
# Counting used KV slots takes time with every running request.
_STEPS_PER_SLOT_COUNT = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """A step that was given to the executor and whose tokens have not been fetched."""

    scheduler_output: SchedulerOutput
    handle: StepHandle
    start_s: float

    @property
    def num_scheduled_tokens(self) -> int:
        return self.scheduler_output.total_num_scheduled_tokens

    @property
    def num_decode_steps(self) -> int:
        return self.scheduler_output.num_decode_steps

    @property
    def is_burst(self) -> bool:
        """True if every request decodes, so the duration is a valid estimate of decode steps."""
        num_reqs = len(self.scheduler_output.num_scheduled_tokens)
        return self.num_decode_steps > 1 or 0 < self.num_scheduled_tokens == num_reqs

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step."""
        return self.handle.is_done


class EngineScheduler(Scheduler, InspectedScheduler, Protocol):
    """The methods that the engine core calls, and the state that its inspector reads."""


class EngineCore:
    """One engine. Not safe for threads: whoever runs it calls everything from one.

    Args:
        max_steps_in_flight: 2 decides the next step while the device computes one, for which the
            scheduler must be an `AsyncScheduler`.
        max_decode_burst: Most decode steps that the device computes as one.
        kv_event_publisher: Told of KV cache events, where the scheduler records them; belongs to
            the engine, and ends with it.
        grammars: Those of its requests, which the scheduler must have as its gate; None where no
            request may have one. Belongs to the engine too.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        executor: Executor,
        kv_event_publisher: KVEventPublisher | None = None,
        *,
        grammars: GrammarManager | None = None,
        max_steps_in_flight: int = 1,
        max_decode_burst: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._kv_event_publisher = kv_event_publisher
        self._grammars = grammars
        self._max_steps_in_flight = max_steps_in_flight
        self._pacer = BurstPacer(max_decode_burst)
        self._in_flight: deque[StepInFlight] = deque()
        self._last_wait_s = 0.0
        self._last_was_single = True
        self._last_was_empty = False
        self._num_steps = 0
        self._num_empty_steps = 0
        self._shutdown: Shutdown | None = None
        self._start_time = time.time()
        self._request_clock = RequestClock()
        self._step_token_counts = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        self._inspection = InspectionRecorder(scheduler)
        self._utilities: dict[str, Callable[..., object]] = {
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "get_stats": self.make_stats,
            "check_invariants": scheduler.check_invariants,
            "explain_prefix_cache_miss": scheduler.explain_prefix_cache_miss,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "inspect": self._inspection.inspect,
            "inspect_block": self._inspection.inspect_block,
        }
        self._utility_signatures = {
            name: inspect.signature(utility) for name, utility in self._utilities.items()
        }

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: compute, fetch, or tell the executor who ended."""
        return (
            self._scheduler.has_unfinished_requests()
            or self._scheduler.has_finished_requests()
            or bool(self._in_flight)
        )

    @property
    def is_finished(self) -> bool:
        """Whether a shutdown was asked for and may happen now."""
        if self._shutdown is None:
            return False
        return not self._shutdown.drain or not self._scheduler.has_unfinished_requests()

    @property
    def spare_s(self) -> float:
        """Seconds that the engine can wait for messages before it decides the next step.

        0 unless the device computes exactly one step and another one may be decided meanwhile. See
        `BurstPacer.spare_s`.
        """
        if len(self._in_flight) != 1 or self._max_steps_in_flight == 1:
            return 0.0
        return self._pacer.spare_s(self._in_flight[0])

    def handle(self, message: EngineInput) -> EngineOutput | None:
        """Obeys one message; returns what its sender is to hear at once, if anything.

        A request that cannot be taken is answered by an output with finish reason "error".
        """
        reply = self._obey(message)
        # A reset has events too, and may find an engine that computes no step for a long time.
        self._publish_kv_events()
        return reply

    def _obey(self, message: EngineInput) -> EngineOutput | None:
        match message:
            case AddRequest(request=request):
                return self._add_request(request)
            case AbortRequests(request_ids=request_ids):
                self._scheduler.finish_requests(request_ids)
                self._request_clock.forget(request_ids)
                self._forget_grammars(request_ids)
                return None
            case UtilityCall():
                return self._call(message)
            case Shutdown():
                self._shutdown = message
                return None
        raise InvariantError(f"unknown message {type(message).__name__}.")

    def step(self) -> StepOutputs:
        """Starts as many steps as may be in flight, then waits for the oldest and takes it home.

        Raises:
            InvariantError: Requests wait, but the scheduler gives none of them a token.
        """
        start_s = time.perf_counter()
        while len(self._in_flight) < self._max_steps_in_flight and self._start_step():
            pass
        outputs = self._fetch_oldest()
        self._publish_kv_events()
        self._num_steps += 1
        # Also when all have ended: nobody may come to correct the last numbers for a long time.
        count_slots = (
            self._num_steps % _STEPS_PER_SLOT_COUNT == 0
            or not self._scheduler.has_unfinished_requests()
        )
        stats = self.make_stats(count_slots=count_slots, only_new=True)
        if self._inspection.is_active:
            took_s = time.perf_counter() - start_s
            self._inspection.on_step(
                outputs,
                took_s=took_s,
                wait_s=self._last_wait_s,
                is_one_token_each=self._last_was_single,
                is_empty=self._last_was_empty,
            )
        return StepOutputs(
            outputs=outputs,
            stats=stats,
            timestamp=time.time(),
            monotonic_s=time.monotonic(),
            request_times=self._request_clock.take_first_tokens(outputs),
        )

    def _start_step(self) -> bool:
        """Decides a step and gives it to the executor; False where it has nothing to compute."""
        if self._in_flight and not self._scheduler.has_unfinished_requests():
            return False
        max_decode_steps = self._pacer.next_length(
            lambda: any(request.is_streamed for request in self._scheduler.running)
        )
        start_s = time.perf_counter()
        scheduler_output = self._scheduler.schedule(max_decode_steps)
        num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        self._check_progress(num_scheduled_tokens)
        self._note_step(scheduler_output)
        # An empty step too: the executor hears who ended.
        handle = self._executor.execute_model(scheduler_output)
        grammars = self._grammars
        if grammars is not None and grammars.num_requests > 0 and handle.needs_bitmask:
            req_ids = drawing_requests(self._scheduler.running, scheduler_output)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            handle.start_sampling(grammars.make_bitmask(req_ids, drafts))
        self._in_flight.append(
            StepInFlight(scheduler_output=scheduler_output, handle=handle, start_s=start_s)
        )
        self._pacer.record_decision(start_s)
        return num_scheduled_tokens > 0

    def _note_step(self, scheduler_output: SchedulerOutput) -> None:
        new_reqs = scheduler_output.scheduled_new_reqs
        if new_reqs:
            self._request_clock.note_scheduled(new.req_id for new in new_reqs)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens > 0:
            # A burst of 4 steps with 12 tokens is 4 steps of 3.
            num_steps = scheduler_output.num_decode_steps
            bucket = bisect.bisect_left(STEP_TOKEN_BUCKETS, num_tokens / num_steps)
            self._step_token_counts[bucket] += num_steps

    def _fetch_oldest(self) -> list[EngineCoreOutput]:
        step = self._in_flight.popleft()
        wait_start_s = time.perf_counter()
        runner_output = step.handle.sample_tokens()
        self._last_wait_s = time.perf_counter() - wait_start_s
        self._pacer.record_fetch(step)
        decided = step.scheduler_output
        self._last_was_single = (
            decided.num_decode_steps == 1 and not decided.scheduled_spec_decode_tokens
        )
        self._last_was_empty = decided.total_num_scheduled_tokens == 0
        outputs = self._scheduler.update_from_output(step.scheduler_output, runner_output)
        in_flight = (other.scheduler_output for other in self._in_flight)
        outputs = advance_grammars(outputs, self._scheduler, self._grammars, in_flight)
        # Behind the grammars: they may end a request that has lost its token to a preemption.
        return _with_prompt_logprobs(outputs, runner_output)

    def _forget_grammars(self, request_ids: list[str]) -> None:
        if self._grammars is not None:
            for request_id in request_ids:
                self._grammars.remove(request_id)

    def make_stats(self, *, count_slots: bool = True, only_new: bool = False) -> SchedulerStats:
        """A snapshot of both halves.

        Args:
            count_slots: Count used KV slots anew; else they are those of the last count.
            only_new: As of `Executor.feature_stats`.
        """
        return msgspec.structs.replace(
            self._scheduler.make_stats(count_slots=count_slots),
            num_compiling_reqs=0 if self._grammars is None else self._grammars.num_compiling,
            num_padded_tokens=self._executor.num_padded_tokens,
            num_corrupted_reqs=self._executor.num_corrupted_requests,
            num_compiles_after_ready=self._executor.num_compiles_after_ready,
            step_token_counts=tuple(self._step_token_counts),
            engine_start_time=self._start_time,
            **self._executor.feature_stats(only_new=only_new),
        )

    def close(self) -> None:
        """Ends the trace and the publisher; nothing may be called afterwards. May be repeated."""
        # A recorded scheduler writes the decision of a step that failed on the device here.
        self._scheduler.close()
        if self._kv_event_publisher is not None:
            self._kv_event_publisher.close()
        if self._grammars is not None:
            self._grammars.close()

    def _publish_kv_events(self) -> None:
        if self._kv_event_publisher is None:
            return
        events = self._scheduler.take_events()
        if events:
            self._kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _add_request(self, request: EngineRequest) -> StepOutputs | None:
        try:
            if self._shutdown is not None:
                raise InvalidRequestError("the engine is shutting down.")
            self._scheduler.add_request(request)
            self._request_clock.note_added(request.request_id)
            if self._grammars is not None and request.needs_grammar:
                self._grammars.add(request)
            self._pacer.record_arrival()
            self._inspection.on_arrival(request.request_id, request.arrival_time)
            return None
        except InvalidRequestError as error:
            # `InputProcessor` should have refused it; only this request ends with it.
            logger.warning("request %r was refused by the engine: %s", request.request_id, error)
            refusal = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason="error"
            )
            return StepOutputs(
                outputs=[refusal],
                stats=self.make_stats(),
                timestamp=time.time(),
                monotonic_s=time.monotonic(),
            )

    def _call(self, call: UtilityCall) -> UtilityReply:
        utility = self._utilities.get(call.method)
        if utility is None:
            wanted = ", ".join(self._utilities)
            return UtilityReply(
                call_id=call.call_id, error=f"unknown method {call.method!r}; wanted {wanted}."
            )
        try:
            self._utility_signatures[call.method].bind(*call.arguments)
        except TypeError as error:
            return UtilityReply(
                call_id=call.call_id, error=f"{call.method} got {call.arguments!r}: {error}."
            )
        try:
            result_json = msgspec.json.encode(utility(*call.arguments)).decode()
        except PaxkvError as error:
            return UtilityReply(call_id=call.call_id, error=f"{type(error).__name__}: {error}")
        return UtilityReply(call_id=call.call_id, result_json=result_json)

    def _start_profile(self, folder: str) -> bool:
        return self._executor.start_profile(folder)

    def _stop_profile(self) -> bool:
        return self._executor.stop_profile()

    def _check_progress(self, num_scheduled_tokens: int) -> None:
        is_idle = not self._scheduler.has_unfinished_requests()
        # Those in flight bring all that is left, or make room for it; but an empty one, which was
        # decided behind them, brings nothing.
        is_computing = any(step.num_scheduled_tokens > 0 for step in self._in_flight)
        if num_scheduled_tokens > 0 or is_idle or is_computing:
            self._num_empty_steps = 0
            return
        if self._scheduler.is_waiting_for_outside():
            time.sleep(_WAIT_S)
            return
        self._num_empty_steps += 1
        if self._num_empty_steps > MAX_EMPTY_STEPS:
            raise InvariantError(
                f"{self._scheduler.num_unfinished_requests()} requests wait, but "
                f"{self._num_empty_steps} steps in a row scheduled no token."
            )


def _with_prompt_logprobs(
    outputs: list[EngineCoreOutput], runner_output: ModelRunnerOutput
) -> list[EngineCoreOutput]:
    """The same, with those that the step brought for the prompts of their requests."""
    if not runner_output.prompt_logprobs:
        return outputs
    # Of a request that lost its first token, to a preemption, and goes on, they come again with the
    # next.
    return [
        msgspec.structs.replace(
            output, prompt_logprobs=runner_output.prompt_logprobs.get(output.request_id)
        )
        for output in outputs
    ]
