"""A server of completions with known delays and known failures, in a thread."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator

MODEL = "fake"
# What the prompt's first token makes the server do.
REFUSE, FAIL_MIDWAY, CUT_OFF, SAY_NOTHING, LINE_SEPARATOR = 1, 2, 3, 4, 5


class FakeCompletionsServer:
    """Answers with `max_tokens` tokens; see `running_fake_server`.

    Args:
        num_awaited: The first answers begin when so many requests run.
    """

    def __init__(
        self,
        *,
        first_delay_s: float = 0.0,
        gap_s: float = 0.0,
        tokens_per_piece: int = 1,
        sends_usage: bool = True,
        is_chunked: bool = False,
        num_awaited: int = 0,
    ) -> None:
        self.first_delay_s = first_delay_s
        self.gap_s = gap_s
        self.tokens_per_piece = tokens_per_piece
        self.sends_usage = sends_usage
        # Streams in chunks and keeps connections, or ends a stream with its connection.
        self.is_chunked = is_chunked
        self.url = ""
        self.metrics = ""
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.num_running = 0
        self.most_running = 0
        self.num_awaited = num_awaited

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Clients may hang up, and the server may end before the last one has.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await self._answer_one(reader, writer)
                while self.is_chunked:
                    await self._answer_one(reader, writer)
                await writer.drain()
            finally:
                writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        if first.startswith("GET /metrics"):
            _answer_bytes(writer, 200, self.metrics.encode())
        elif first.startswith("GET"):
            _answer(writer, 200, {"data": [{"id": MODEL}, {"id": "another"}]})
        else:
            body = await reader.readexactly(int(headers["content-length"]))
            self.keys.append(headers.get("authorization"))
            await self._complete(json.loads(body), writer)

    async def _complete(self, body: dict, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._stream(body, writer)
        finally:
            self.num_running -= 1

    async def _stream(self, body: dict, writer: asyncio.StreamWriter) -> None:
        order = body["prompt"][0]
        if order == REFUSE:
            _answer(writer, 503, {"error": {"message": "too much"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        if self.is_chunked:
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        else:
            writer.write(b"Connection: close\r\n\r\n")
        while self.most_running < self.num_awaited:
            await asyncio.sleep(0.001)
        num_tokens = 0 if order == SAY_NOTHING else body["max_tokens"]
        for token in range(0, num_tokens, self.tokens_per_piece):
            await asyncio.sleep(self.gap_s if token else self.first_delay_s)
            if token and order == FAIL_MIDWAY:
                self._event(writer, {"error": {"message": "the engine died"}})
                return
            if token and order == CUT_OFF:
                writer.close()
                return
            text = "a\u2028b" if order == LINE_SEPARATOR else "a"
            self._event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        self._event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.sends_usage:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            self._event(writer, {"choices": [], "usage": usage})
        self._send(writer, b"data: [DONE]\n\n")
        if self.is_chunked:
            self._send(writer, b"")

    def _event(self, writer: asyncio.StreamWriter, event: dict) -> None:
        # As it is, not escaped: characters that some take for the end of a line stay in it.
        text = json.dumps(event, ensure_ascii=False)
        self._send(writer, b"data: " + text.encode() + b"\n\n")

    def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.is_chunked:
            data = b"%x\r\n%s\r\n" % (len(data), data)
        writer.write(data)


def _answer(writer: asyncio.StreamWriter, status: int, body: dict) -> None:
    _answer_bytes(writer, status, json.dumps(body).encode())


def _answer_bytes(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n".encode())
    writer.write(b"Connection: close\r\n\r\n" + data)


@contextlib.contextmanager
def running_fake_server(**settings: object) -> Iterator[FakeCompletionsServer]:
    """A server on a free loopback port; `url` has its address with the version."""
    fake = FakeCompletionsServer(**settings)
    is_ready = threading.Event()
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(is_over.set))
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        fake.url = f"http://{host}:{port}/v1"
        is_ready.set()
        await is_over.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_ready.wait(60)
        yield fake
    finally:
        ends[0]()
        thread.join(60)
        assert not thread.is_alive()
