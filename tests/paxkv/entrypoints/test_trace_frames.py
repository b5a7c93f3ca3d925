"""The command that replays a trace for a page: frames on stdout, an exit code, limits."""

import resource
import subprocess
import sys

import msgspec

from paxkv.entrypoints import trace_frames
from tests.paxkv.inspector.recorded_trace import record


def test_frames_of_a_trace_are_written_as_lines(tmp_path):
    scheduler = record(tmp_path / "trace")
    run = subprocess.run(
        [sys.executable, "-m", "paxkv.entrypoints.trace_frames", str(tmp_path / "trace")],
        capture_output=True,
        check=True,
        timeout=120,
    )
    *frames, end = map(msgspec.json.decode, run.stdout.splitlines())
    assert [list(frame) for frame in frames] == [["frame"]] * (scheduler.num_steps + 1)
    assert (end["end"]["num_steps"], end["end"]["note"]) == (scheduler.num_steps, None)


def test_limits_are_set_before_the_file_is_read(tmp_path, monkeypatch, capsysbinary):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (-1, 100 if kind == 0 else -1))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(resource, "RLIMIT_CPU", 0)
    monkeypatch.setattr(resource, "RLIMIT_AS", 9)
    monkeypatch.setattr(trace_frames, "frame_lines", lambda file, make: iter([b"%d" % len(limits)]))
    assert trace_frames.main([str(tmp_path)]) == 0
    assert capsysbinary.readouterr().out == b"2\n"
    # The processor's hard limit is below the limit of this command.
    assert limits == {0: (100, 100), 9: (trace_frames.MAX_MEMORY_BYTES, -1)}


def test_file_that_is_not_a_trace_is_one_error_line(tmp_path):
    (tmp_path / "junk").write_bytes(b"no trace")
    run = subprocess.run(
        [sys.executable, "-m", "paxkv.entrypoints.trace_frames", str(tmp_path / "junk")],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 2
    error = msgspec.json.decode(run.stdout)["error"]
    assert error.startswith("the file has no complete first line")
