"""A trace becomes the frames that a page would have got from the engine that wrote it."""

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


def test_frames_end_in_the_pool_that_was_recorded(tmp_path):
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


def test_long_traces_have_several_steps_in_a_frame(tmp_path, monkeypatch):
    scheduler = record(tmp_path / "trace")
    monkeypatch.setattr(trace_frames, "MAX_FRAMES", 4)
    frames, end = read(frame_lines(tmp_path / "trace", make_scheduler))
    assert len(frames) <= 6 and end["num_steps"] == scheduler.num_steps
    page = PageState(frames[0])
    for frame in frames[1:]:
        page.apply(frame)
    check_equals_the_pool(page, scheduler)


def test_where_the_replay_differs_it_says_so_and_stops(tmp_path):
    record(tmp_path / "trace")
    lines = (tmp_path / "trace").read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"num_free_blocks":', b'"num_free_blocks":9')
    (tmp_path / "trace").write_bytes(b"".join(lines))
    frames, end = read(frame_lines(tmp_path / "trace", make_scheduler))
    assert len(frames) == 6 and "num_free_blocks" in end["note"]


def test_pool_that_is_too_large_is_refused(tmp_path, monkeypatch):
    record(tmp_path / "trace")
    monkeypatch.setattr(trace_frames, "MAX_BLOCKS", 11)
    with pytest.raises(TraceFileError, match="12 blocks"):
        next(frame_lines(tmp_path / "trace", make_scheduler))
