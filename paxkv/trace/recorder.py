"""`TraceRecorder`: forwards calls to a scheduler and reports each with its result."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.protocols import GrammarGate, KVConnector
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.kv_cache.observers.block_movements import BlockMovementLog, BlockMovements
from paxkv.scheduler.request import EndReason
from paxkv.scheduler.scheduler import Scheduler
from paxkv.trace.calls import (
    AddRequestCall,
    Call,
    ControlCall,
    ControlMethod,
    Decision,
    FinishRequestsCall,
    OutputRow,
    SampledRow,
    ScheduleCall,
    UpdateCall,
    encode_request,
)
from paxkv.trace.header import TraceHeader
from paxkv.trace.outside import QuestionLog, RecordingConnector, RecordingGrammarGate

_ResultT = TypeVar("_ResultT")
_NOTHING_MOVED = BlockMovements()
_TIME_DIGITS = 7  # 0.1 µs; more digits would only make files larger


class SchedulerFactory(Protocol):
    """Builds a scheduler from a header. Equal headers must build equal schedulers."""

    def __call__(
        self,
        header: TraceHeader,
        *,
        connector: KVConnector | None = None,
        grammar_gate: GrammarGate | None = None,
    ) -> Scheduler: ...


def make_recorder(
    header: TraceHeader,
    make_scheduler: SchedulerFactory,
    report: Callable[[Call], None],
    *,
    on_close: Callable[[], None] | None = None,
    connector: KVConnector | None = None,
    grammar_gate: GrammarGate | None = None,
) -> "TraceRecorder":
    """Builds a scheduler and a `TraceRecorder` for it.

    Wraps the connector and the grammar gate before it builds the scheduler, so that all questions
    are recorded.
    """
    questions = QuestionLog()
    scheduler = make_scheduler(
        header,
        connector=None if connector is None else RecordingConnector(connector, questions),
        grammar_gate=None
        if grammar_gate is None
        else RecordingGrammarGate(grammar_gate, questions),
    )
    return TraceRecorder(scheduler, report, questions, on_close)


class TraceRecorder:
    """Replaces a scheduler: it has the same methods and returns the same results.

    Methods that do not change the scheduler are forwarded without a report.

    Args:
        scheduler: A new scheduler. From now on, only the recorder may call it.
        report: Called after each call, also if the call raised an error.
        questions: Records the scheduler's questions.
        on_close: Called by `close`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        report: Callable[[Call], None],
        questions: QuestionLog,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._report = report
        self._on_close = on_close
        self._questions = questions
        self._block_pool = scheduler.kv_cache_manager.block_pool
        self._movement_log = BlockMovementLog()
        self._block_pool.add_observer(self._movement_log)
        self._start_s = time.perf_counter()
        self._num_steps = 0
        # Step number -> output of a step whose tokens have not arrived.
        self._steps_in_flight: dict[int, SchedulerOutput] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)

    def add_request(self, request: EngineRequest) -> None:
        """See `Scheduler.add_request`. Reports rejected requests too."""
        # Encode before the call, which may change the request.
        encoded = encode_request(request)
        self._observe(
            lambda: self._scheduler.add_request(request),
            lambda _, common: AddRequestCall(request=encoded, **common),
        )

    def finish_requests(
        self, request_ids: Iterable[str], finish_reason: EndReason = "abort"
    ) -> None:
        """See `Scheduler.finish_requests`."""
        ids = list(request_ids)
        self._observe(
            lambda: self._scheduler.finish_requests(ids, finish_reason),
            lambda _, common: FinishRequestsCall(
                request_ids=ids, finish_reason=finish_reason, **common
            ),
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`."""
        return self._control("reset_prefix_cache", reset_running_requests)

    def schedule(self, max_decode_steps: int = 1) -> SchedulerOutput:
        """See `Scheduler.schedule`."""
        self._num_steps += 1
        output = self._observe(
            lambda: self._scheduler.schedule(max_decode_steps),
            lambda output, common: self._describe_schedule(output, max_decode_steps, common),
        )
        self._steps_in_flight[self._num_steps] = output
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """See `Scheduler.update_from_output`.

        Raises:
            InvariantError: `scheduler_output` does not belong to a step in flight.
        """
        step = self._pop_step(scheduler_output)
        sampled = [
            SampledRow(req_id, list(token_ids))
            for req_id, token_ids in zip(
                runner_output.req_ids, runner_output.sampled_token_ids, strict=True
            )
        ]
        return self._observe(
            lambda: self._scheduler.update_from_output(scheduler_output, runner_output),
            lambda outputs, common: UpdateCall(
                step=step,
                sampled=sampled,
                draft_token_ids=runner_output.draft_token_ids,
                burst_drafts=runner_output.burst_drafts,
                pooled=list(runner_output.pooler_output),
                kv_connector_output=runner_output.kv_connector_output,
                outputs=[OutputRow.from_output(output) for output in outputs or ()],
                **common,
            ),
        )

    def close(self) -> None:
        """Closes the scheduler and the trace. Only `close` may be called afterwards."""
        self._scheduler.close()
        if self._on_close is not None:
            self._on_close()

    def _control(self, method: ControlMethod, *arguments: object) -> object:
        return self._observe(
            lambda: getattr(self._scheduler, method)(*arguments),
            lambda result, common: ControlCall(
                method=method, arguments=list(arguments), result=result, **common
            ),
        )

    def _observe(
        self,
        method: Callable[[], _ResultT],
        describe: Callable[[_ResultT | None, dict[str, object]], Call],
    ) -> _ResultT:
        """Calls `method` and reports what `describe` makes of the result (None after an error)."""
        start_s = time.perf_counter()
        try:
            result = method()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._report(describe(None, self._common_fields(start_s, error=message)))
            raise
        self._report(describe(result, self._common_fields(start_s)))
        return result

    def _common_fields(self, start_s: float, error: str | None = None) -> dict[str, object]:
        moved = self._movement_log.drain()
        return {
            "at_s": round(start_s - self._start_s, _TIME_DIGITS),
            "took_s": round(time.perf_counter() - start_s, _TIME_DIGITS),
            "error": error,
            "questions": self._questions.drain(),
            "moved": None if moved == _NOTHING_MOVED else moved,
        }

    def _describe_schedule(
        self, output: SchedulerOutput | None, max_decode_steps: int, common: dict[str, object]
    ) -> ScheduleCall:
        return ScheduleCall(
            step=self._num_steps,
            max_decode_steps=max_decode_steps,
            decision=None if output is None else Decision.from_output(output),
            num_running_reqs=len(self._scheduler.running),
            num_waiting_reqs=len(self._scheduler.waiting),
            num_free_blocks=self._block_pool.get_num_free_blocks(),
            **common,
        )

    def _pop_step(self, scheduler_output: SchedulerOutput) -> int:
        for step, output in self._steps_in_flight.items():
            if output is scheduler_output:
                del self._steps_in_flight[step]
                return step
        raise InvariantError("received the tokens of a step that is not in flight.")
