"""A trace is converted to the frames that its engine would have sent to a page."""

import msgspec
import pytest

from paxkv.contracts.observation import InspectorFrame
from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.errors import TraceFileError
from paxkv.inspector import trace_frames
from paxkv.inspector.trace_frames import frame_lines
from tests.paxkv.inspector.inspected_pool import PageState, check_equals_the_pool
from tests.paxkv.inspector.recorded_trace import record


def read(lines):
    *frames, end = [msgspec.json.decode(line) for line in lines]
    return [msgspec.convert(f["frame"], InspectorFrame) for f in frames], end["end"]


def test_last_frame_equals_the_recorded_pool(tmp_path):
    scheduler = record(tmp_path / "trace")
    frames, end = read(frame_lines(tmp_path / "trace", make_scheduler))
    assert len(frames) == scheduler.num_steps + 1 and end["note"] is None
    assert end["num_preemptions"] == scheduler.num_preemptions > 0
    page = PageState(frames[0])
    preempted = set()
    for frame in frames[1:]:
        assert frame.at_s >= 0 and frame.counters.host_s > 0 and frame.counters.device_s >= 0
        page.apply(frame)
        rows = [page.waiting[i : i + 4] for i in range(0, len(page.waiting), 4)]
        preempted |= {page.name(key) for key, _, _, num_preemptions in rows if num_preemptions}
    assert preempted
    check_equals_the_pool(page, scheduler)
    assert sum(len(frame.ttft_s) for frame in frames) == 6


def test_frame_of_a_long_trace_covers_several_steps(tmp_path, monkeypatch):
    scheduler = record(tmp_path / "trace")
    monkeypatch.setattr(trace_frames, "MAX_FRAMES", 4)
    frames, end = read(frame_lines(tmp_path / "trace", make_scheduler))
    assert len(frames) <= 6 and end["num_steps"] == scheduler.num_steps
    page = PageState(frames[0])
    for frame in frames[1:]:
        page.apply(frame)
    check_equals_the_pool(page, scheduler)


def test_replay_stops_at_the_first_difference_and_reports_it(tmp_path):
    record(tmp_path / "trace")
    lines = (tmp_path / "trace").read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"num_free_blocks":', b'"num_free_blocks":9')
    (tmp_path / "trace").write_bytes(b"".join(lines))
    frames, end = read(frame_lines(tmp_path / "trace", make_scheduler))
    assert len(frames) == 6 and "num_free_blocks" in end["note"]


def test_trace_with_a_too_large_pool_is_rejected(tmp_path, monkeypatch):
    record(tmp_path / "trace")
    monkeypatch.setattr(trace_frames, "MAX_BLOCKS", 11)
    with pytest.raises(TraceFileError, match="12 blocks"):
        next(frame_lines(tmp_path / "trace", make_scheduler))
