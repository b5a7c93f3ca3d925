"""Replays a trace on a new scheduler and finds the first difference from the recording."""

import dataclasses

import msgspec

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import ConfigError, TraceFileError
from paxkv.trace.calls import (
    AddRequestCall,
    Call,
    ControlCall,
    Decision,
    FinishRequestsCall,
    ScheduleCall,
    UpdateCall,
)
from paxkv.trace.difference import Difference, first_difference
from paxkv.trace.header import TraceHeader
from paxkv.trace.outside import RecordedAnswers
from paxkv.trace.recorder import SchedulerFactory, TraceRecorder, make_recorder
from paxkv.trace.trace_file import TraceReader


@dataclasses.dataclass(slots=True, kw_only=True)
class ReplaySummary:
    """Totals of the replayed calls, up to and including the first difference.

    Args:
        num_hit_tokens: Prompt tokens found in the prefix cache or shared with a fork source.
        num_output_tokens: Output tokens of requests, not counting tokens after their end.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Drafts that were accepted.
        failure: The last error that the scheduler raised, except for a rejected request.
        difference: None if all calls were as recorded.
        difference_at: The step and the call of `difference`.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_hit_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    failure: str | None = None
    difference: Difference | None = None
    difference_at: str = ""


def replay(reader: TraceReader, make_scheduler: SchedulerFactory) -> ReplaySummary:
    """Repeats every recorded call and compares the results, up to the first difference.

    Args:
        make_scheduler: Builds the scheduler that gets the calls.

    Raises:
        TraceFileError: The trace cannot be read, or a call cannot be repeated.
    """
    player = TracePlayer(reader.header, make_scheduler)
    summary = ReplaySummary()
    for line in reader.lines():
        for recorded in line.calls:
            replay_call(player, recorded, summary)
            if summary.difference is not None:
                return summary
    return summary


def replay_call(player: "TracePlayer", recorded: Call, summary: ReplaySummary) -> None:
    """Repeats one call; adds its counts, and a difference if there is one, to the summary.

    Raises:
        TraceFileError: The call cannot be repeated.
    """
    got = player.play(recorded)
    _count(summary, got)
    counts = player.scheduler.draft_counts
    summary.num_draft_tokens = counts.num_draft_tokens
    summary.num_accepted_tokens = counts.num_accepted_tokens
    difference = _first_difference(got, recorded)
    if difference is not None:
        step = getattr(recorded, "step", summary.num_steps)
        name = recorded.__struct_config__.tag
        summary.difference, summary.difference_at = difference, f"step {step}, {name}"


class TracePlayer:
    """Repeats recorded calls on a new scheduler."""

    def __init__(self, header: TraceHeader, make_scheduler: SchedulerFactory) -> None:
        self._reported: list[Call] = []
        self._answers = RecordedAnswers()
        try:
            self._scheduler = make_recorder(
                header,
                make_scheduler,
                self._reported.append,
                connector=self._answers if header.has_connector else None,
                grammar_gate=self._answers if header.has_grammar_gate else None,
            )
        except ConfigError as error:
            raise TraceFileError(
                f"no scheduler can be built from line 1, the header: {error}"
            ) from error
        # Step number -> output of a step whose tokens have not arrived.
        self._steps_in_flight: dict[int, SchedulerOutput] = {}

    @property
    def scheduler(self) -> TraceRecorder:
        """The scheduler that gets the calls."""
        return self._scheduler

    def play(self, recorded: Call) -> Call:
        """Repeats a call; returns it with the result of the new scheduler."""
        self._answers.expect(recorded.questions)
        try:
            self._play(recorded)
        except Exception:
            # If the scheduler raised the error, the recorder has reported it as the call's result.
            if not self._reported:
                raise
        return self._reported.pop()

    def _play(self, recorded: Call) -> None:
        match recorded:
            case AddRequestCall():
                self._scheduler.add_request(recorded.engine_request())
            case FinishRequestsCall():
                self._scheduler.finish_requests(recorded.request_ids, recorded.finish_reason)
            case ControlCall():
                getattr(self._scheduler, recorded.method)(*recorded.arguments)
            case ScheduleCall():
                output = self._scheduler.schedule(recorded.max_decode_steps)
                self._steps_in_flight[recorded.step] = output
            case UpdateCall():
                if recorded.step not in self._steps_in_flight:
                    raise TraceFileError(f"tokens of step {recorded.step}, which never began.")
                output = self._steps_in_flight.pop(recorded.step)
                self._scheduler.update_from_output(output, recorded.runner_output())


def _first_difference(got: Call, recorded: Call) -> Difference | None:
    """Compares two calls without their times and the texts of errors, which versions may reword.

    Errors come first, because a call with an error has no result.
    """
    if _error_type(got) != _error_type(recorded):
        return Difference("error", got.error, recorded.error)
    # The fields of `_Call` come last, so a different decision is found before different movements.
    return first_difference(_comparable(got), _comparable(recorded))


def _error_type(call: Call) -> str | None:
    return None if call.error is None else call.error.partition(":")[0]


def _comparable(call: Call) -> Call:
    return msgspec.structs.replace(call, at_s=0.0, took_s=0.0, error=None)


def _count(summary: ReplaySummary, call: Call) -> None:
    match call:
        case AddRequestCall():
            summary.num_requests += 1
        case ScheduleCall(decision=Decision() as decision):
            summary.num_steps += 1
            summary.num_preemptions += len(decision.preempted)
            rows = (*decision.running, *decision.resumed, *decision.new)
            summary.num_scheduled_tokens += sum(row.num_scheduled_tokens for row in rows)
            summary.num_hit_tokens += sum(row.num_computed_tokens for row in decision.new)
        case UpdateCall():
            summary.num_output_tokens += sum(len(row.new_token_ids) for row in call.outputs)
    # A rejected request is a normal result, not a failure of the scheduler.
    if call.error is not None and not isinstance(call, AddRequestCall):
        summary.failure = call.error
