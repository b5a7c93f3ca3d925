"""One connection that streams completions, with as little work a piece as Python can do.

Where hundreds of streams share few processors with the server, a full HTTP client is the slower
side, and all times are its own. This one knows what an answer of HTTP/1.1 in chunks looks like, and
nothing else; it keeps its connection from request to request.
"""

import asyncio
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from benchmarks.serve.completions_client import AnswerStream, ServerError
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord


class LightClient:
    """Talks to one server, one request at a time; an asynchronous context manager.

    Args:
        url: Without the version, such as "http://127.0.0.1:8000".
        timeout_s: Longest that a whole answer may take.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._address = urlsplit(url)
        self._timeout_s = timeout_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "LightClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._hang_up()

    async def complete(
        self, request: RequestInput, fields: Mapping[str, object], *, start: float
    ) -> RequestRecord:
        """Sends one request and reads its stream to the end; failures are in the record.

        Args:
            fields: Of the body, besides the prompt and its length.
            start: `time.perf_counter()` when the load began.
        """
        body = {
            **fields,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = AnswerStream()
        error: str | None = None
        sent_s = time.perf_counter() - start
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(msgspec.json.encode(body), stream)
        except (OSError, EOFError, ValueError, ServerError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            self._hang_up()
        usage = stream.usage
        return RequestRecord(
            due_s=sent_s,
            sent_s=sent_s,
            chunk_times_s=tuple(t - start for t in stream.chunk_times),
            end_s=time.perf_counter() - start,
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_output_tokens=0 if usage is None else usage.completion_tokens,
            counted_by="usage",
            num_asked_tokens=request.max_tokens,
            text="".join(stream.texts),
            error=error,
        )

    async def _stream(self, content: bytes, stream: AnswerStream) -> None:
        if self._writer is None:
            address = self._address
            self._reader, self._writer = await asyncio.open_connection(
                address.hostname, address.port
            )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise ServerError(f"wanted status 200, got {answer.splitlines()[0].decode()!r}.")
        rest = b""
        while num_bytes := int(await self._reader.readline(), 16):
            chunk = await self._reader.readexactly(num_bytes + len(b"\r\n"))
            now = time.perf_counter()
            *lines, rest = (rest + chunk[:-2]).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    stream.take(line.removeprefix(b"data:").strip(), now)
        await self._reader.readexactly(len(b"\r\n"))
        if not stream.is_complete or stream.usage is None or not stream.chunk_times:
            raise ServerError("the stream ended before the answer did, or without its usage.")

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
