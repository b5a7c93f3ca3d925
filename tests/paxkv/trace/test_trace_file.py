"""A trace file always contains whole steps, and errors name a broken line."""

import errno
import gc
import logging
import os
from pathlib import Path

import pytest

from paxkv.errors import ConfigError, TraceFileError
from paxkv.trace.calls import FinishRequestsCall, ScheduleCall, UpdateCall
from paxkv.trace.trace_file import TraceReader, TraceWriter, check_trace_file
from tests.paxkv.trace.small_traces import make_header

FINISH = FinishRequestsCall(request_ids=["a"], finish_reason="abort")
STEP_1 = [ScheduleCall(step=1), FINISH, UpdateCall(step=1)]
STEP_2 = [ScheduleCall(step=2), UpdateCall(step=2)]


def write(file: Path, calls: list) -> TraceWriter:
    writer = TraceWriter(file, make_header())
    for call in calls:
        writer.write(call)
    return writer


def test_each_step_is_written_immediately_as_one_line(tmp_path: Path) -> None:
    file = tmp_path / "t"
    writer = write(file, STEP_1)
    assert file.read_bytes().count(b"\n") == 2  # the header and a step
    for number, call in enumerate(STEP_2, start=1):
        writer.write(call)
        assert file.read_bytes().count(b"\n") == (2 if number == 1 else 3)
    reader = TraceReader.open(file)
    assert reader.header == make_header()
    assert [line.calls for line in reader.lines()] == [STEP_1, STEP_2]
    assert reader.cut_off_line is None


def test_failed_decision_is_written(tmp_path: Path) -> None:
    failed = ScheduleCall(step=1, error="InvariantError: why")
    write(tmp_path / "t", [FINISH, failed])
    (line,) = TraceReader.open(tmp_path / "t").lines()
    assert line.calls == [FINISH, failed]


def test_close_writes_calls_after_the_last_step(tmp_path: Path) -> None:
    writer = write(tmp_path / "t", [*STEP_1, FINISH])
    writer.close()
    assert [line.calls for line in TraceReader.open(tmp_path / "t").lines()] == [STEP_1, [FINISH]]


def test_collected_writer_closes_its_file(tmp_path: Path) -> None:
    """Warnings are errors, so the test fails if an open file is garbage-collected."""
    write(tmp_path / "t", STEP_1)
    gc.collect()
    assert len(list(TraceReader.open(tmp_path / "t").lines())) == 1


@pytest.mark.parametrize("num_bytes_lost", [1, 2, 30])
def test_cut_off_last_line_is_reported_and_other_lines_are_read(
    tmp_path: Path, num_bytes_lost: int
) -> None:
    write(tmp_path / "t", [*STEP_1, *STEP_2])
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-num_bytes_lost])
    reader = TraceReader.open(tmp_path / "t")
    assert [line.calls for line in reader.lines()] == [STEP_1]
    assert reader.cut_off_line == 3


# The last three: invalid UTF-8 in a key and in a value, and lists nested too deeply.
@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"]",
        b'{"calls":[{"call":"jump"}]}',
        b"\xff",
        b"",
        b'{"\xff":[]}',
        b'{"calls":[{"call":"finish_requests","request_ids":["\xff"],"finish_reason":"abort"}]}',
        b'{"calls":[{"call":"add_request","request":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
    ids=repr,
)
def test_error_names_a_line_that_is_not_a_step(tmp_path: Path, line: bytes) -> None:
    write(tmp_path / "t", STEP_1)
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data + line + b"\n")
    with pytest.raises(TraceFileError, match="line 3: not a step"):
        list(TraceReader.open(tmp_path / "t").lines())


@pytest.mark.parametrize("data", [b"", b'{"format":"paxkv-trace"'])
def test_file_without_a_complete_header_is_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceFileError, match="no complete first line"):
        TraceReader.open(tmp_path / "t")


def test_missing_file_and_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read"):
        TraceReader.open(tmp_path / "missing")
    with pytest.raises(TraceFileError, match="cannot be read"):
        TraceReader.open(tmp_path)


def test_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t")
    with pytest.raises(TraceFileError, match="is a pipe"):
        TraceReader.open(tmp_path / "t")


def test_file_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_file=.*missing/t"):
        TraceWriter(tmp_path / "missing" / "t", make_header())


def test_early_check_does_not_change_the_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"an older trace")
    check_trace_file(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == b"an older trace"
    for file in (tmp_path / "missing" / "t", tmp_path):
        with pytest.raises(ConfigError, match="trace_file="):
            check_trace_file(file)


def test_full_disk_ends_only_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    caplog.set_level(logging.ERROR)
    writer = write(Path("/dev/full"), STEP_1 + STEP_2)
    writer.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the trace cannot be written and ends here"
    ]
    assert str(errno.ENOSPC) in caplog.text
