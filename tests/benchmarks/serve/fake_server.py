"""A completions server that answers `httpx` clients inside the test's process."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest


def piece(text: str, finish_reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


END = piece("", "length")


class FakeServer:
    """Answers with `events`, or else with `max_tokens` pieces "a", each after `gap_s`.

    No answer begins before `num_awaited` requests run. With another `status`, no event is sent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        self.status, self.events, self.metrics, self.gap_s, self.num_awaited = 200, [], "", 0.0, 1
        vars(self).update(settings)
        self.num_requests = self.num_running = self.most_running = 0
        client, transport = httpx.AsyncClient, httpx.MockTransport(self._answer)
        monkeypatch.setattr(httpx, "AsyncClient", lambda **s: client(transport=transport, **s))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, text=self.metrics)
        self.num_requests += 1
        if self.status != 200:
            return httpx.Response(self.status, text='{"error": "too much"}')
        return httpx.Response(200, content=self._stream(json.loads(request.content)))

    async def _stream(self, body: dict) -> AsyncIterator[bytes]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        async with asyncio.timeout(20):
            while self.most_running < self.num_awaited:
                await asyncio.sleep(0.001)
        for event in self.events or [*[piece("a")] * body["max_tokens"], END]:
            await asyncio.sleep(self.gap_s)
            # Not escaped: some clients take characters of JSON for the end of a line.
            yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        self.num_running -= 1
