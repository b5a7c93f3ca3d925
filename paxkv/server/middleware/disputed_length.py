"""Closes the connection after a request that states its length in two ways."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class DisputedLengthMiddleware:
    """Answers a request with Content-Length and Transfer-Encoding, and then ends its connection.

    h11 reads such a body by its Transfer-Encoding. A proxy in front may have read it by its
    Content-Length, so what follows on the connection may be another client's request, or a
    smuggled one.

    Source: RFC 9112, section 6.3.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if not {b"content-length", b"transfer-encoding"} <= names:
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                # uvicorn and h11 close the connection after such an answer.
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_and_close)
