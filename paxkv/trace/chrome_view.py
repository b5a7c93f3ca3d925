"""Converts a trace to Chrome trace events: a row per request, a slice per step, and counters.

Source: "Trace Event Format", the Chromium project's description of the JSON that chrome://tracing
and Perfetto read.
"""

import dataclasses
from pathlib import Path

import msgspec

from paxkv.errors import TraceFileError
from paxkv.trace.calls import (
    AddRequestCall,
    CachedRow,
    Call,
    ControlCall,
    FinishRequestsCall,
    NewRow,
    ScheduleCall,
    UpdateCall,
)
from paxkv.trace.trace_file import TraceReader

# Groups of rows ("processes" of the format), and the rows ("threads") of the engine.
ENGINE_PID, REQUESTS_PID = 1, 2
SCHEDULER_TID, FIRST_STEP_TID = 1, 2


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event.

    Args:
        ph: "X" is a slice, "C" a counter, "i" an instant, "M" the name of a group or row.
        ts: Microseconds since the recorder's start.
        dur: Duration of a slice in microseconds.
        s: Scope of an instant: "t" is its row.
    """

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float | None = None
    s: str | None = None
    args: dict[str, str | int | None] = {}


class TraceView(msgspec.Struct):
    """The content of the file."""

    traceEvents: list[TraceEvent]  # the format's own name
    displayTimeUnit: str = "ms"


@dataclasses.dataclass(slots=True)
class _Row:
    """A request's row and its current slice.

    Args:
        busy_until_s: End of the last step that computed the request.
    """

    tid: int
    num_prompt_tokens: int
    state: str
    since_s: float
    busy_until_s: float | None = None
    num_tokens: int = 0


def write_chrome_view(reader: TraceReader, out: Path) -> int:
    """Writes the view of a trace; returns the number of events.

    Raises:
        TraceFileError: The trace cannot be read, or `out` cannot be written.
    """
    if out.resolve() == reader.file.resolve():
        raise TraceFileError(f"{out} is the trace itself. Write the view to another file.")
    builder = _ViewBuilder()
    for line in reader.lines():
        for call in line.calls:
            builder.add(call)
    events = builder.finish()
    try:
        out.write_bytes(msgspec.json.encode(TraceView(traceEvents=events)))
    except OSError as error:
        raise TraceFileError(f"{out} cannot be written: {error.strerror}.") from error
    return len(events)


class _ViewBuilder:
    """Converts calls to events. Add the calls in order."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._rows: dict[str, _Row] = {}
        self._num_rows = 0
        self._steps_in_flight: dict[int, ScheduleCall] = {}
        # End of the last step on each row of steps. A step that starts earlier needs another row.
        self._step_row_ends_s: list[float] = []
        self._end_s = 0.0
        self._name(ENGINE_PID, 0, "engine")
        self._name(ENGINE_PID, SCHEDULER_TID, "scheduler")
        self._name(REQUESTS_PID, 0, "requests")

    def add(self, call: Call) -> None:
        end_s = call.at_s + call.took_s
        self._end_s = max(self._end_s, end_s)
        match call:
            case AddRequestCall(error=None):
                request = call.engine_request()
                self._num_rows += 1
                self._name(REQUESTS_PID, self._num_rows, request.request_id)
                self._rows[request.request_id] = _Row(
                    self._num_rows, len(request.prompt_token_ids), "waiting", call.at_s
                )
            case FinishRequestsCall():
                for req_id in call.request_ids:
                    self._finish_request(req_id, call.at_s, call.finish_reason)
            case ControlCall():
                args = {"result": str(call.result)}
                self._instant(ENGINE_PID, SCHEDULER_TID, call.method, call.at_s, args)
            case ScheduleCall():
                self._slice(ENGINE_PID, SCHEDULER_TID, "schedule", call.at_s, end_s)
                self._add_decision(call)
            case UpdateCall():
                self._slice(ENGINE_PID, SCHEDULER_TID, "update", call.at_s, end_s)
                self._add_update(call, end_s)

    def finish(self) -> list[TraceEvent]:
        """Returns all events by time. Unfinished requests end at the end of the trace."""
        for row in self._rows.values():
            self._end_slice(row, self._end_s)
        # Names first. Of slices that start together, the longest first: it contains the others.
        self._events.sort(key=lambda e: (e.ph != "M", e.ts, -(e.dur or 0.0)))
        return self._events

    def _add_decision(self, call: ScheduleCall) -> None:
        self._steps_in_flight[call.step] = call
        counts = {"running": call.num_running_reqs, "waiting": call.num_waiting_reqs}
        self._counter("free blocks", call.at_s, {"free blocks": call.num_free_blocks})
        self._counter("requests", call.at_s, counts)
        if call.decision is None:
            return
        # A preempted request is not part of this step, but the step before may still compute it.
        for req_id in call.decision.preempted:
            self._change_state(req_id, "preempted", call.at_s, 0)
        decision = call.decision
        for scheduled in (*decision.running, *decision.resumed, *decision.new):
            state = self._state_in_step(scheduled)
            num_tokens = scheduled.num_scheduled_tokens
            self._change_state(scheduled.req_id, state, call.at_s, num_tokens)

    def _state_in_step(self, scheduled: CachedRow | NewRow) -> str:
        """ "decode" if at most one known token is left to compute, else "prefill chunk"."""
        row = self._rows.get(scheduled.req_id)
        num_outputs = getattr(scheduled, "num_output_tokens", 0)
        num_known = num_outputs + (0 if row is None else row.num_prompt_tokens)
        return "decode" if num_known - scheduled.num_computed_tokens <= 1 else "prefill chunk"

    def _add_update(self, call: UpdateCall, end_s: float) -> None:
        decided = self._steps_in_flight.pop(call.step, None)
        if decided is not None and decided.decision is not None:
            self._add_step(decided, end_s)
        for output in call.outputs:
            if output.finish_reason is not None:
                self._finish_request(output.req_id, end_s, output.finish_reason)

    def _add_step(self, decided: ScheduleCall, end_s: float) -> None:
        decision, start_s = decided.decision, decided.at_s
        scheduled = (*decision.running, *decision.resumed, *decision.new)
        for row in (self._rows.get(s.req_id) for s in scheduled):
            if row is not None:
                row.busy_until_s = end_s
        args = {
            "tokens": sum(s.num_scheduled_tokens for s in scheduled),
            "requests": len(scheduled),
            "preempted": len(decision.preempted),
            "running": decided.num_running_reqs,
            "waiting": decided.num_waiting_reqs,
            "free blocks": decided.num_free_blocks,
        }
        if decision.num_decode_steps > 1:
            args["decode steps"] = decision.num_decode_steps
        tid = FIRST_STEP_TID + self._free_step_row(start_s, end_s)
        self._slice(ENGINE_PID, tid, f"step {decided.step}", start_s, end_s, args)

    def _free_step_row(self, start_s: float, end_s: float) -> int:
        for row, row_end_s in enumerate(self._step_row_ends_s):
            if row_end_s <= start_s:
                self._step_row_ends_s[row] = end_s
                return row
        self._step_row_ends_s.append(end_s)
        row = len(self._step_row_ends_s) - 1
        self._name(ENGINE_PID, FIRST_STEP_TID + row, "steps" if row == 0 else f"steps {row + 1}")
        return row

    def _change_state(self, req_id: str, state: str, at_s: float, num_tokens: int) -> None:
        row = self._rows.get(req_id)
        if row is None:
            return
        # Consecutive decode steps share a slice; each chunk of a prompt has its own.
        if row.state == state == "decode":
            row.num_tokens += num_tokens
            return
        self._end_slice(row, at_s)
        row.state, row.since_s, row.num_tokens, row.busy_until_s = state, at_s, num_tokens, None

    def _finish_request(self, req_id: str, at_s: float, finish_reason: str) -> None:
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._end_slice(row, at_s)
            args = {"finish_reason": finish_reason}
            self._instant(REQUESTS_PID, row.tid, f"finished: {finish_reason}", at_s, args)

    def _end_slice(self, row: _Row, at_s: float) -> None:
        # The slice ends with its step, even if the request's next step starts later.
        end_s = at_s if row.busy_until_s is None else min(at_s, row.busy_until_s)
        args = {"tokens": row.num_tokens} if row.num_tokens else {}
        self._slice(REQUESTS_PID, row.tid, row.state, row.since_s, end_s, args)

    def _slice(
        self,
        pid: int,
        tid: int,
        name: str,
        start_s: float,
        end_s: float,
        args: dict[str, str | int | None] | None = None,
    ) -> None:
        ts, end = _microseconds(start_s), _microseconds(end_s)
        dur = round(max(end - ts, 0.0), 3)
        self._events.append(
            TraceEvent(name=name, ph="X", pid=pid, tid=tid, ts=ts, dur=dur, args=args or {})
        )

    def _instant(
        self, pid: int, tid: int, name: str, at_s: float, args: dict[str, str | int | None]
    ) -> None:
        ts = _microseconds(at_s)
        self._events.append(
            TraceEvent(name=name, ph="i", pid=pid, tid=tid, ts=ts, s="t", args=args)
        )

    def _counter(self, name: str, at_s: float, args: dict[str, str | int | None]) -> None:
        ts = _microseconds(at_s)
        self._events.append(TraceEvent(name=name, ph="C", pid=ENGINE_PID, tid=0, ts=ts, args=args))

    def _name(self, pid: int, tid: int, name: str) -> None:
        """Names a row; `tid` 0 names the group."""
        kind = "thread_name" if tid else "process_name"
        self._events.append(
            TraceEvent(name=kind, ph="M", pid=pid, tid=tid, ts=0.0, args={"name": name})
        )


def _microseconds(seconds: float) -> float:
    """Converts seconds; rounds to nanoseconds, so that equal times stay equal."""
    return round(seconds * 1e6, 3)
