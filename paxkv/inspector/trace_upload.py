"""TraceUploads: traces that were recorded elsewhere, replayed in a process of their own."""

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
# What the reading process says of a file that it cannot read.
_UNREADABLE = b'{"error":'


class TraceTooLargeError(InvalidRequestError):
    """The trace is over the operator's limit."""

    http_status = 413


class TraceBusyError(InvalidRequestError):
    """Another trace is being replayed."""

    http_status = 429


class UnreadableTraceError(InvalidRequestError):
    """What came is no trace that can be read."""


class TraceUploads:
    """Replays one trace at a time: a trace is as dear as the work that it recorded.

    A process of its own keeps it from the server's loop, and has limits on memory and time.
    """

    def __init__(self, max_trace_bytes: int) -> None:
        self._max_trace_bytes = max_trace_bytes
        self._is_busy = False

    async def start(self, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """Takes a trace in, and returns its frames as JSON lines.

        Raises:
            TraceBusyError: Another one is being replayed.
            TraceTooLargeError: It is over the limit.
            UnreadableTraceError: It is no trace that can be read.
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
            # A limit, or somebody, ended it.
            message = "the replay took more memory or time than it may; what came before is shown."
            if is_first:
                raise UnreadableTraceError(message)
            yield msgspec.json.encode({"error": message}) + b"\n"

    async def _receive(self, body: AsyncIterable[bytes], path: Path) -> None:
        num_bytes = 0
        # Unbuffered writes go to the page cache: short, whatever the disk does.
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
                        f"the trace cannot be kept: {os.strerror(error.errno or 0)}."
                    ) from error


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for line in rest:
            yield line
