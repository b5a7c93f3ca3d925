"""Writes and reads trace files: a header line, then one JSON line per completed step."""

import dataclasses
import io
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from paxkv.errors import ConfigError, TraceFileError
from paxkv.trace.calls import Call, ScheduleCall, UpdateCall
from paxkv.trace.header import TraceHeader, decode_header, encode_header
from paxkv.trace.json_errors import JSON_ERRORS

logger = logging.getLogger(__name__)


class StepLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One line: the calls since the previous line, up to and including a step's update.

    Exceptions: a `schedule` that raised an error ends its line, and `close` ends the last line.
    """

    calls: list[Call]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(StepLine)


def check_trace_file(file: Path) -> None:
    """Checks early that a trace can be written to `file`. Does not change an existing file.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """
    _open(file, "ab").close()


class TraceWriter:
    """Writes calls to a file. The file always has complete lines up to the last complete step.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """

    def __init__(self, file: Path, header: TraceHeader) -> None:
        self._out = _open(file, "wb")
        # Encoded immediately, because a call may change before its line is written.
        self._calls: list[bytes] = []
        # Without a call of `close`, only the calls since the last complete step are lost.
        self._close_file = weakref.finalize(self, self._out.close)
        self._write_line(encode_header(header))

    def write(self, call: Call) -> None:
        """Adds a call. An update ends the line, as does a `schedule` that raised an error."""
        if self._out.closed:
            return
        self._calls.append(_ENCODER.encode(call))
        if isinstance(call, UpdateCall) or (isinstance(call, ScheduleCall) and call.error):
            self._end_line()

    def close(self) -> None:
        """Writes the calls since the last complete step and closes the file; may be repeated.

        If the device failed in a step, the last call is the decision of that step.
        """
        if self._calls:
            self._end_line()
        self._close_file()

    def _end_line(self) -> None:
        # The JSON of a `StepLine`.
        line = b'{"calls":[' + b",".join(self._calls) + b"]}"
        self._calls.clear()
        self._write_line(line)

    def _write_line(self, line: bytes) -> None:
        try:
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[self._out.write(rest) :]
        except OSError as error:
            # A full disk must not fail requests.
            logger.error("the trace cannot be written and ends here: %s", error)
            self._close_file()


@dataclasses.dataclass(slots=True)
class TraceReader:
    """Reads a trace line by line.

    Args:
        cut_off_line: Number of the last line, if `lines` has found it incomplete, because the
            recording process ended while it wrote the line.
    """

    file: Path
    header: TraceHeader
    cut_off_line: int | None = None

    @classmethod
    def open(cls, file: Path) -> "TraceReader":
        """Reads the header.

        Raises:
            TraceFileError: The file cannot be read, or its first line is not a header.
        """
        if file.is_fifo():
            # A trace is read more than once, and a pipe can be read only once.
            raise TraceFileError(f"{file} is a pipe. Write the trace to a file first.")
        first = next(_lines(file), b"")
        if not first.endswith(b"\n"):
            raise TraceFileError(
                f"{file} has no complete first line, so it is not a trace. Record one with "
                "--trace-file."
            )
        return cls(file, decode_header(first))

    def lines(self) -> Iterator[StepLine]:
        """Yields the complete lines after the header.

        Raises:
            TraceFileError: A line is not a step; the message has its number.
        """
        for number, line in enumerate(_lines(self.file), start=1):
            if number == 1:
                continue
            if not line.endswith(b"\n"):
                self.cut_off_line = number
                return
            try:
                yield _DECODER.decode(line)
            except JSON_ERRORS as error:
                raise TraceFileError(f"{self.file}, line {number}: not a step: {error}.") from error


def _open(file: Path, mode: Literal["wb", "ab"]) -> io.FileIO:
    try:
        # Unbuffered, so that written lines are in the file even if this process crashes.
        return file.open(mode, buffering=0)
    except OSError as error:
        raise ConfigError(
            f"trace_file={str(file)!r} cannot be written: {error.strerror}. Name a file in a "
            "folder that exists, or leave it out."
        ) from error


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise TraceFileError(f"{file} cannot be read: {error.strerror}.") from error
