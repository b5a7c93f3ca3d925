"""`EngineCore`: runs the steps of a scheduler and an executor, and handles messages."""

import bisect
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
from paxkv.contracts.executor import Executor
from paxkv.contracts.observation import KVEventBatch
from paxkv.contracts.protocols import Scheduler
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.engine.burst_pacer import BurstPacer
from paxkv.engine.grammar_steps import advance_grammars, masked_request_ids
from paxkv.engine.kv_event_publisher import KVEventPublisher
from paxkv.engine.request_clock import RequestClock
from paxkv.engine.step_in_flight import StepInFlight
from paxkv.errors import InvalidRequestError, InvariantError, PaxkvError
from paxkv.inspector.inspected_scheduler import InspectedScheduler
from paxkv.inspector.recorder import InspectionRecorder
from paxkv.structured_output.grammar_manager import GrammarManager

logger = logging.getLogger(__name__)

# The scheduler must schedule a token in every step, unless all requests wait for another component.
# The engine stops with an error after this many steps in a row without a token.
MAX_EMPTY_STEPS = 8
# If all requests wait for another component, a step sleeps this long to let the component run.
_WAIT_S = 0.001
# Counting used KV slots takes time for each running request, so not every step counts them.
_STEPS_PER_SLOT_COUNT = 16


class EngineScheduler(Scheduler, InspectedScheduler, Protocol):
    """The methods that the engine core calls, and the state that its inspector reads."""


class EngineCore:
    """One engine. All its methods must be called from one thread.

    Args:
        kv_event_publisher: Receives the KV cache events that the scheduler records. The engine
            closes it.
        grammars: The grammars of requests, or None if no request may have one. Must be the object
            that the scheduler has as `grammar_gate`. The engine closes it.
        max_steps_in_flight: 1, or 2 to decide the next step while the device computes one. For 2,
            the scheduler must be an `AsyncScheduler`.
        max_decode_burst: Largest number of decode steps in a burst.
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
            "start_profile": lambda folder: executor.start_profile(folder),
            "stop_profile": lambda: executor.stop_profile(),
            "inspect": self._inspection.inspect,
            "inspect_block": self._inspection.inspect_block,
        }
        self._utility_signatures = {
            name: inspect.signature(utility) for name, utility in self._utilities.items()
        }

    @property
    def has_work(self) -> bool:
        """Whether a step would compute, fetch tokens, or report ended requests to the executor."""
        return (
            self._scheduler.has_unfinished_requests()
            or self._scheduler.has_finished_requests()
            or bool(self._in_flight)
        )

    @property
    def is_finished(self) -> bool:
        """Whether a client has requested a shutdown that may happen now."""
        if self._shutdown is None:
            return False
        return not self._shutdown.drain or not self._scheduler.has_unfinished_requests()

    @property
    def spare_s(self) -> float:
        """Seconds that the engine can wait for messages before it decides the next step.

        0 unless the device computes exactly one step and the engine may decide another one
        meanwhile. See `BurstPacer.spare_s`.
        """
        if len(self._in_flight) != 1 or self._max_steps_in_flight == 1:
            return 0.0
        return self._pacer.spare_s(self._in_flight[0])

    def handle(self, message: EngineInput) -> EngineOutput | None:
        """Handles one message; returns the immediate reply, or None if there is none.

        The reply to a request that the engine refuses is an output with finish reason "error".
        """
        reply = self._handle(message)
        # A reset of the prefix cache records events, and the next step may come much later.
        self._publish_kv_events()
        return reply

    def _handle(self, message: EngineInput) -> EngineOutput | None:
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
        """Starts as many steps as may be in flight, then fetches the tokens of the oldest one.

        Raises:
            InvariantError: Requests wait, but the scheduler schedules no tokens.
        """
        start_s = time.perf_counter()
        while len(self._in_flight) < self._max_steps_in_flight and self._start_step():
            pass
        step = self._in_flight.popleft()
        outputs, wait_s = self._fetch(step)
        self._publish_kv_events()
        self._num_steps += 1
        # Also count when no unfinished request is left, because the next step may come much later.
        count_slots = (
            self._num_steps % _STEPS_PER_SLOT_COUNT == 0
            or not self._scheduler.has_unfinished_requests()
        )
        stats = self.make_stats(count_slots=count_slots, only_new=True)
        if self._inspection.is_active:
            has_drafts = bool(step.scheduler_output.scheduled_spec_decode_tokens)
            self._inspection.on_step(
                outputs,
                took_s=time.perf_counter() - start_s,
                wait_s=wait_s,
                is_one_token_each=step.num_decode_steps == 1 and not has_drafts,
                is_empty=step.num_scheduled_tokens == 0,
            )
        return self._step_outputs(outputs, stats)

    def _step_outputs(self, outputs: list[EngineCoreOutput], stats: SchedulerStats) -> StepOutputs:
        return StepOutputs(
            outputs=outputs,
            stats=stats,
            timestamp=time.time(),
            monotonic_s=time.monotonic(),
            request_times=self._request_clock.pop_first_token_times(outputs),
        )

    def _start_step(self) -> bool:
        """Decides a step and gives it to the executor; False if it has nothing to compute."""
        scheduler = self._scheduler
        is_waiting = scheduler.is_waiting_for_drafts or not scheduler.has_unfinished_requests()
        if self._in_flight and is_waiting:
            return False
        max_decode_steps = self._pacer.next_length(
            lambda: any(request.is_streamed for request in self._scheduler.running)
        )
        start_s = time.perf_counter()
        scheduler_output = self._scheduler.schedule(max_decode_steps)
        num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        self._check_progress(num_scheduled_tokens)
        self._count_step(scheduler_output)
        # The executor gets empty steps too, because they name finished requests.
        handle = self._executor.execute_model(scheduler_output)
        grammars = self._grammars
        if grammars is not None and grammars.num_requests > 0 and handle.needs_bitmask:
            req_ids = masked_request_ids(self._scheduler.running, scheduler_output)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            handle.start_sampling(grammars.make_bitmask(req_ids, drafts))
        self._in_flight.append(
            StepInFlight(scheduler_output=scheduler_output, handle=handle, start_s=start_s)
        )
        self._pacer.record_decision(start_s)
        return num_scheduled_tokens > 0

    def _count_step(self, scheduler_output: SchedulerOutput) -> None:
        new_reqs = scheduler_output.scheduled_new_reqs
        if new_reqs:
            self._request_clock.record_scheduled(new.req_id for new in new_reqs)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens > 0:
            # A burst of 4 steps with 12 tokens counts as 4 steps of 3 tokens.
            num_steps = scheduler_output.num_decode_steps
            bucket = bisect.bisect_left(STEP_TOKEN_BUCKETS, num_tokens / num_steps)
            self._step_token_counts[bucket] += num_steps

    def _fetch(self, step: StepInFlight) -> tuple[list[EngineCoreOutput], float]:
        """Waits for a step; returns its outputs, and the seconds that it waited."""
        wait_start_s = time.perf_counter()
        runner_output = step.handle.sample_tokens()
        wait_s = time.perf_counter() - wait_start_s
        self._pacer.record_fetch(step)
        outputs = self._scheduler.update_from_output(step.scheduler_output, runner_output)
        in_flight = (other.scheduler_output for other in self._in_flight)
        outputs = advance_grammars(outputs, self._scheduler, self._grammars, in_flight)
        # Last, because `advance_grammars` may add the last output of a preempted request.
        return _with_prompt_logprobs(outputs, runner_output), wait_s

    def _forget_grammars(self, request_ids: list[str]) -> None:
        if self._grammars is not None:
            for request_id in request_ids:
                self._grammars.remove(request_id)

    def make_stats(self, *, count_slots: bool = True, only_new: bool = False) -> SchedulerStats:
        """Returns the statistics of the scheduler, the executor and the engine.

        Args:
            count_slots: Count used KV slots again. False: use the last count.
            only_new: See `Executor.feature_stats`.
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
        """Closes the scheduler, the executor, the publisher and the grammars. May be repeated."""
        # While a trace is recorded, this writes the decision of a step that failed on the device.
        self._scheduler.close()
        self._executor.close()
        if self._kv_event_publisher is not None:
            self._kv_event_publisher.close()
        if self._grammars is not None:
            self._grammars.close()

    def _publish_kv_events(self) -> None:
        if self._kv_event_publisher is None:
            return
        events = self._scheduler.drain_events()
        if events:
            self._kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _add_request(self, request: EngineRequest) -> StepOutputs | None:
        try:
            if self._shutdown is not None:
                raise InvalidRequestError("the engine is shutting down.")
            self._scheduler.add_request(request)
            self._request_clock.record_added(request.request_id)
            if self._grammars is not None and request.needs_grammar:
                self._grammars.add(request)
            self._pacer.record_arrival()
            self._inspection.on_arrival(request.request_id, request.arrival_time)
            return None
        except InvalidRequestError as error:
            # `InputProcessor` should have refused the request. Other requests continue.
            logger.warning("request %r was refused by the engine: %s", request.request_id, error)
            refusal = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason="error"
            )
            return self._step_outputs([refusal], self.make_stats())

    def _call(self, call: UtilityCall) -> UtilityReply:
        utility = self._utilities.get(call.method)
        if utility is None:
            known = ", ".join(self._utilities)
            return UtilityReply(
                call_id=call.call_id, error=f"unknown method {call.method!r}; use one of {known}."
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

    def _check_progress(self, num_scheduled_tokens: int) -> None:
        is_idle = not self._scheduler.has_unfinished_requests()
        # A step in flight that computes tokens may finish requests, or free blocks for others. An
        # empty step does neither.
        is_computing = any(step.num_scheduled_tokens > 0 for step in self._in_flight)
        if num_scheduled_tokens > 0 or is_idle or is_computing:
            self._num_empty_steps = 0
            return
        if self._scheduler.may_schedule_nothing():
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
    """Adds the log-probabilities of prompts to the outputs of their requests.

    A request that was preempted may have no output. Its prompt is then computed again, and a later
    step returns the log-probabilities again.
    """
    if not runner_output.prompt_logprobs:
        return outputs
    return [
        msgspec.structs.replace(
            output, prompt_logprobs=runner_output.prompt_logprobs.get(output.request_id)
        )
        for output in outputs
    ]
