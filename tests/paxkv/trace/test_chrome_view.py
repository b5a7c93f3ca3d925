"""The view has a row per request with a slice per state, and steps with their numbers."""

import json
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from paxkv.entrypoints.build_scheduler import record_scheduler
from paxkv.errors import TraceFileError
from paxkv.trace.calls import (
    AddRequestCall,
    CachedRow,
    Call,
    ControlCall,
    Decision,
    FinishRequestsCall,
    NewRow,
    OutputRow,
    ScheduleCall,
    UpdateCall,
    encode_request,
)
from paxkv.trace.chrome_view import ENGINE_PID, REQUESTS_PID, write_chrome_view
from paxkv.trace.trace_file import TraceReader, TraceWriter
from tests.paxkv.trace.small_traces import (
    make_header,
    make_request,
    record_run,
    run_to_end,
)


def view_of(file: Path) -> list[dict]:
    num_events = write_chrome_view(TraceReader.open(file), file.with_suffix(".json"))
    view = json.loads(file.with_suffix(".json").read_text())
    assert view["displayTimeUnit"] == "ms"
    assert len(view["traceEvents"]) == num_events
    return view["traceEvents"]


def view_of_calls(file: Path, calls: list[Call]) -> list[dict]:
    writer = TraceWriter(file, make_header())
    for call in calls:
        writer.write(call)
    writer.close()
    return view_of(file)


def slices(events: list[dict], name: str) -> list[tuple]:
    """(name, from, to) of the row's slices in milliseconds."""
    (row,) = (
        (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] == name
    )
    return [
        (e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == row
    ]


# Two steps of 10 ms, each decided in 1 ms. "a" arrives at 0, computes 16 of its 17 tokens at 10,
# the last at 20, decodes at 30 and 40, and ends at 50. "b" arrives at 5, runs at 20, is
# preempted at 30, resumes at 40, and is aborted at 55.
LIFE = [
    AddRequestCall(request=encode_request(make_request("a", 17)), at_s=0.0),
    AddRequestCall(request=encode_request(make_request("b", 4)), at_s=0.005),
    ScheduleCall(
        step=1,
        at_s=0.010,
        took_s=0.001,
        decision=Decision(new=[NewRow("a", 16, 0, [[1, 2]])]),
        num_running_reqs=1,
        num_waiting_reqs=1,
        num_free_blocks=6,
    ),
    UpdateCall(step=1, at_s=0.018, took_s=0.001),
    ScheduleCall(
        step=2,
        at_s=0.020,
        took_s=0.001,
        decision=Decision(
            running=[CachedRow("a", 1, 16, 0, [[3]])], new=[NewRow("b", 4, 0, [[4]])]
        ),
    ),
    UpdateCall(step=2, at_s=0.028, took_s=0.001),
    ScheduleCall(
        step=3,
        at_s=0.030,
        decision=Decision(running=[CachedRow("a", 1, 17, 1, None)], preempted=["b"]),
    ),
    UpdateCall(step=3, at_s=0.038, took_s=0.001),
    ScheduleCall(
        step=4,
        at_s=0.040,
        decision=Decision(
            running=[CachedRow("a", 1, 18, 2, None)], resumed=[CachedRow("b", 5, 0, 1, [[4]])]
        ),
    ),
    UpdateCall(step=4, at_s=0.049, took_s=0.001, outputs=[OutputRow("a", [7], "length", None, 0)]),
    ControlCall(method="reset_prefix_cache", result=False, at_s=0.052),
    FinishRequestsCall(request_ids=["b", "nobody"], finish_reason="abort", at_s=0.055),
]


def test_states_of_requests_are_slices(tmp_path: Path) -> None:
    events = view_of_calls(tmp_path / "t", LIFE)
    assert slices(events, "a") == [
        ("waiting", 0, 10),
        ("prefill chunk", 10, 19),
        ("decode", 20, 50),
    ]
    assert slices(events, "b") == [
        ("waiting", 5, 20),
        ("prefill chunk", 20, 29),
        ("preempted", 30, 40),
        ("prefill chunk", 40, 50),
    ]
    ends = [(e["name"], e["ts"]) for e in events if e["ph"] == "i" and e["pid"] == REQUESTS_PID]
    assert ends == [("finished: length", 50_000), ("finished: abort", 55_000)]


def test_steps_and_host_calls_are_slices_with_their_numbers(tmp_path: Path) -> None:
    events = view_of_calls(tmp_path / "t", LIFE)
    assert slices(events, "steps")[:2] == [("step 1", 10, 19), ("step 2", 20, 29)]
    assert slices(events, "scheduler")[:2] == [("schedule", 10, 11), ("update", 18, 19)]
    (first,) = (e for e in events if e["name"] == "step 1")
    assert first["args"] == {
        "tokens": 16,
        "requests": 1,
        "preempted": 0,
        "running": 1,
        "waiting": 1,
        "free blocks": 6,
    }
    counters = [e for e in events if e["ph"] == "C" and e["ts"] == 10_000]
    assert [(e["name"], e["args"]) for e in counters] == [
        ("free blocks", {"free blocks": 6}),
        ("requests", {"running": 1, "waiting": 1}),
    ]
    assert [e["ts"] for e in events if e["name"] == "reset_prefix_cache"] == [52_000]


def test_burst_is_one_step_with_its_number_of_decode_steps(tmp_path: Path) -> None:
    calls = [
        AddRequestCall(request=encode_request(make_request("a", 4)), at_s=0.0),
        ScheduleCall(step=1, at_s=0.01, decision=Decision(new=[NewRow("a", 4, 0, [[1]])])),
        UpdateCall(step=1, at_s=0.02),
        ScheduleCall(
            step=2,
            at_s=0.02,
            decision=Decision(num_decode_steps=8, running=[CachedRow("a", 8, 4, 1, None)]),
        ),
        UpdateCall(step=2, at_s=0.05),
    ]
    events = view_of_calls(tmp_path / "t", calls)
    assert slices(events, "a")[-1] == ("decode", 20, 50)
    (single, burst) = (e["args"] for e in events if e["name"] in ("step 1", "step 2"))
    assert (burst["tokens"], burst["decode steps"]) == (8, 8)
    assert "decode steps" not in single


def test_overlapping_steps_are_in_different_rows(tmp_path: Path) -> None:
    calls = [
        ScheduleCall(step=1, at_s=0.0, decision=Decision()),
        ScheduleCall(step=2, at_s=0.1, decision=Decision()),
        UpdateCall(step=1, at_s=0.2),
        ScheduleCall(step=3, at_s=0.2, decision=Decision()),
        UpdateCall(step=2, at_s=0.3),
        UpdateCall(step=3, at_s=0.4),
    ]
    events = view_of_calls(tmp_path / "t", calls)
    assert slices(events, "steps") == [("step 1", 0, 200), ("step 3", 200, 400)]
    assert slices(events, "steps 2") == [("step 2", 100, 300)]


def test_unfinished_requests_end_at_the_end_of_the_trace(tmp_path: Path) -> None:
    events = view_of_calls(tmp_path / "t", LIFE[:3])
    assert slices(events, "a") == [("waiting", 0, 10), ("prefill chunk", 10, 11)]
    assert slices(events, "b") == [("waiting", 5, 11)]


def test_reused_request_id_gets_a_new_row(tmp_path: Path) -> None:
    add = LIFE[0]
    end = FinishRequestsCall(request_ids=["a"], finish_reason="abort", at_s=0.001)
    events = view_of_calls(tmp_path / "t", [add, end, add, end])
    rows = [e["tid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "a"]
    assert rows == [1, 2]


def test_view_of_a_recorded_run_is_well_formed(tmp_path: Path) -> None:
    """Viewers need known phases, rising times, named rows and nested slices."""
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    for i in range(8):
        scheduler.add_request(make_request(f"r{i}", 14, max_tokens=20, first_token=i))
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    events = view_of(tmp_path / "t")
    assert {e["ph"] for e in events} == {"M", "X", "C", "i"}
    assert all({"name", "ph", "pid", "tid", "ts"} <= e.keys() for e in events)
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times) and times[0] >= 0
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {n for (pid, _), n in names.items() if pid == REQUESTS_PID} == {
        f"r{i}" for i in range(8)
    }
    rows = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert (e["pid"], e["tid"]) in names and e["dur"] >= 0
            start_ns = round(e["ts"] * 1e3)
            rows[e["pid"], e["tid"]].append((start_ns, start_ns + round(e["dur"] * 1e3)))
    for spans in rows.values():
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert start >= end, "slices of a row must not overlap"
    assert all(pid in (ENGINE_PID, REQUESTS_PID) for pid, _ in rows)
    assert sum(e["name"] == "preempted" for e in events) == scheduler.num_preemptions


def test_view_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    record_scheduler(make_header(), tmp_path / "t")
    with pytest.raises(TraceFileError, match="cannot be written"):
        write_chrome_view(TraceReader.open(tmp_path / "t"), tmp_path / "missing" / "out.json")


def test_view_never_overwrites_its_trace(tmp_path: Path) -> None:
    file = tmp_path / "t"
    record_run(file, make_request("a"))
    data = file.read_bytes()
    with pytest.raises(TraceFileError, match="the trace itself"):
        write_chrome_view(TraceReader.open(file), tmp_path / "." / "t")
    assert file.read_bytes() == data


def test_invalid_request_in_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="a recorded request cannot be read"):
        view_of_calls(tmp_path / "t", [AddRequestCall(request=msgspec.Raw(b"{}"))])
