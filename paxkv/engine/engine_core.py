"""`EngineCore`: steps and messages, between a deciding scheduler and a computing executor."""

import dataclasses
import logging
import time
from collections.abc import Callable

import msgspec

from paxkv.contracts.engine_output import (
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
from paxkv.errors import InvalidRequestError, InvariantError, PaxkvError
from paxkv.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# The scheduler promises a token to someone in every step; so many without one would never end.
MAX_EMPTY_STEPS = 8


class EngineCore:
    """One engine. Not safe for threads: whoever runs it calls everything from one."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._num_empty_steps = 0
        self._shutdown: Shutdown | None = None
        self._utilities: dict[str, Callable[[], object]] = {
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "get_stats": self.make_stats,
            "check_invariants": scheduler.check_invariants,
        }

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: compute, or tell the executor who ended."""
        return self._scheduler.has_unfinished_requests() or self._scheduler.has_finished_requests()

    @property
    def is_finished(self) -> bool:
        """Whether a shutdown was asked for and may happen now."""
        if self._shutdown is None:
            return False
        return not self._shutdown.drain or not self._scheduler.has_unfinished_requests()

    def handle(self, message: EngineInput) -> EngineOutput | None:
        """Obeys one message; returns what its sender is to hear at once, if anything.

        A request that cannot be taken is answered by an output with finish reason "error".
        """
        match message:
            case AddRequest(request=request):
                return self._add_request(request)
            case AbortRequests(request_ids=request_ids):
                self._scheduler.finish_requests(request_ids)
                return None
            case UtilityCall():
                return self._call(message)
            case Shutdown():
                self._shutdown = message
                return None
        raise InvariantError(f"unknown message {type(message).__name__}.")

    def step(self) -> StepOutputs:
        """Schedules, computes and samples one step.

        Raises:
            InvariantError: Requests wait, but the scheduler gives none of them a token.
        """
        scheduler_output = self._scheduler.schedule()
        self._check_progress(scheduler_output.total_num_scheduled_tokens)
        # An empty step too: the executor hears who ended.
        handle = self._executor.execute_model(scheduler_output)
        outputs = self._scheduler.update_from_output(scheduler_output, handle.sample_tokens())
        return StepOutputs(outputs=outputs, stats=self.make_stats(), timestamp=time.time())

    def make_stats(self) -> SchedulerStats:
        """A snapshot of both halves."""
        return dataclasses.replace(
            self._scheduler.make_stats(),
            num_padded_tokens=self._executor.num_padded_tokens,
            num_compiles_after_ready=self._executor.num_compiles_after_ready,
        )

    def _add_request(self, request: EngineRequest) -> StepOutputs | None:
        try:
            if self._shutdown is not None:
                raise InvalidRequestError("the engine is shutting down.")
            self._scheduler.add_request(request)
            return None
        except InvalidRequestError as error:
            # `InputProcessor` should have refused it; only this request ends with it.
            logger.warning("request %r was refused by the engine: %s", request.request_id, error)
            refusal = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason="error"
            )
            return StepOutputs(outputs=[refusal], stats=self.make_stats(), timestamp=time.time())

    def _call(self, call: UtilityCall) -> UtilityReply:
        utility = self._utilities.get(call.method)
        if utility is None:
            wanted = ", ".join(self._utilities)
            return UtilityReply(
                call_id=call.call_id, error=f"unknown method {call.method!r}; wanted {wanted}."
            )
        try:
            result_json = msgspec.json.encode(utility()).decode()
        except PaxkvError as error:
            return UtilityReply(call_id=call.call_id, error=f"{type(error).__name__}: {error}")
        return UtilityReply(call_id=call.call_id, result_json=result_json)

    def _check_progress(self, num_scheduled_tokens: int) -> None:
        is_stuck = num_scheduled_tokens == 0 and self._scheduler.has_unfinished_requests()
        self._num_empty_steps = self._num_empty_steps + 1 if is_stuck else 0
        if self._num_empty_steps > MAX_EMPTY_STEPS:
            raise InvariantError(
                f"{self._scheduler.num_unfinished_requests()} requests wait, but "
                f"{self._num_empty_steps} steps in a row scheduled no token."
            )
