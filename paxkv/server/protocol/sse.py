"""Server-sent events: a stream of `data:` lines that ends with `[DONE]` or with an error.

If events have a `type`, as in OpenAI's Responses API, it is their name, and `[DONE]` is left out.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paxkv.server.loop_turn import LoopTurn
from paxkv.server.protocol.error_response import describe_error

_DONE = b"data: [DONE]\n\n"


class EventStreamResponse(Response):
    """Sends the events of a generator as they arrive, and always closes the generator.

    When the client disconnects, the handler is cancelled. Then closing the generator aborts the
    request in the engine.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: msgspec.Struct,
        rest: AsyncGenerator[msgspec.Struct, None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # A stream has no length; Response.__init__ has set that of an empty body.
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    @classmethod
    async def start(
        cls,
        events: AsyncGenerator[msgspec.Struct, None],
    ) -> Self:
        """Waits for the first event. An error before it can still have its own HTTP status."""
        return cls(await anext(events), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                await _send_event(send, self._first)
                turn = LoopTurn()
                async for event in self._rest:
                    await _send_event(send, event)
                    await turn.end_if_long()
                last = b"" if hasattr(self._first, "type") else _DONE
            except Exception as error:
                # The status has already been sent, so the error is sent as an event.
                _, body = describe_error(error)
                name = b"event: error\n" if hasattr(self._first, "type") else b""
                last = name + b"data: " + body + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_event(send: Send, event: msgspec.Struct) -> None:
    name = getattr(event, "type", None)
    head = b"data: " if name is None else f"event: {name}\ndata: ".encode()
    data = head + msgspec.json.encode(event) + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})
