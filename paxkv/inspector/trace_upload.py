"""`TraceUploads`: replays uploaded traces in a separate process."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path

import msgspec

from paxkv.errors import InvalidRequestError, TraceFileError

_CHUNK_BYTES = 2**16
# A frame is one line, and a snapshot of a large pool is a few megabytes.
_MAX_LINE_BYTES = 2**27
# Start of the line that the replay process prints for an unreadable file.
_UNREADABLE = b'{"error":'


class TraceTooLargeError(InvalidRequestError):
    """The trace is larger than --inspector-max-trace-bytes."""

    http_status = 413


class TraceBusyError(InvalidRequestError):
    """Another trace is being replayed."""

    http_status = 429


class UnreadableTraceError(InvalidRequestError):
    """The uploaded file is not a readable trace."""


class TraceUploads:
    """Replays one trace at a time, because a replay repeats all of the scheduler's work.

    The replay runs in a separate process with limits on memory and time, so that it does not block
    the server's loop.
    """

    def __init__(self, max_trace_bytes: int) -> None:
        self._max_trace_bytes = max_trace_bytes
        self._is_busy = False

    async def start(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Receives a trace and returns its frames as JSON lines.

        Raises:
            TraceBusyError: Another trace is being replayed.
            TraceTooLargeError: The trace is larger than the limit.
            UnreadableTraceError: The body is not a readable trace.
            TraceFileError: The trace cannot be written to a temporary file.
        """
        if self._is_busy:
            raise TraceBusyError("another trace is being replayed; try again in a minute.")
        self._is_busy = True
        lines = self._replay_alone(body)
        try:
            first = await anext(lines)
        except BaseException:
            await lines.aclose()
            raise
        return _with_first(first, lines)

    async def _replay_alone(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._replay(body)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._is_busy = False

    async def _replay(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        with tempfile.NamedTemporaryFile(prefix="paxkv-trace-") as file:
            await self._receive(body, Path(file.name))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "paxkv.entrypoints.trace_frames",
                file.name,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_LINE_BYTES,
            )
            try:
                async for line in self._read_lines(process):
                    yield line
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await process.wait()

    async def _read_lines(self, process: asyncio.subprocess.Process) -> AsyncGenerator[bytes, None]:
        assert process.stdout is not None
        is_first = True
        async for line in process.stdout:
            if is_first and line.startswith(_UNREADABLE):
                raise UnreadableTraceError(msgspec.json.decode(line)["error"])
            is_first = False
            yield line
        if await process.wait() < 0:
            # A signal ended the process, usually because it exceeded a limit.
            message = "the replay exceeded its limit of memory or time, so only a part is shown."
            if is_first:
                raise UnreadableTraceError(message)
            yield msgspec.json.encode({"error": message}) + b"\n"

    async def _receive(self, body: AsyncIterable[bytes], path: Path) -> None:
        num_bytes = 0
        # Blocks the loop only briefly: unbuffered writes go to the system's page cache.
        with path.open("wb", buffering=0) as file:
            async for chunk in body:
                num_bytes += len(chunk)
                if num_bytes > self._max_trace_bytes:
                    raise TraceTooLargeError(
                        f"the trace has more than {self._max_trace_bytes} bytes. Start the server "
                        "with a larger --inspector-max-trace-bytes."
                    )
                try:
                    file.write(chunk)
                except OSError as error:
                    raise TraceFileError(
                        f"the server cannot store the trace: {os.strerror(error.errno or 0)}. Free "
                        "space in its folder for temporary files."
                    ) from error


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for line in rest:
            yield line
