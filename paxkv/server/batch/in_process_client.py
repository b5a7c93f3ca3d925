"""Sends requests to an ASGI application in the same process, without a socket."""

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message

_logger = logging.getLogger(__name__)


class InProcessResponse(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    body: bytes


async def post_json(app: ASGIApp, path: str, body: bytes, *, request_id: str) -> InProcessResponse:
    """Sends a POST request with JSON. Cancelling this cancels the request.

    Args:
        request_id: Sent as X-Request-Id.
    """
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    return await _call(app, "POST", path, body, headers, name=request_id)


async def get_text(app: ASGIApp, path: str) -> str:
    """Sends a GET request; returns the body of the answer."""
    return (await _call(app, "GET", path, b"", [], name=path)).body.decode()


async def _call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes,
    headers: list[tuple[bytes, bytes]],
    *,
    name: str,
) -> InProcessResponse:
    exchange = _Exchange(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, exchange.receive, exchange.send)
    except Exception:
        # Starlette answers a bug with status 500, and then raises it so that it is logged.
        if not exchange.status:
            raise
        _logger.exception("request %s failed", name)
    return InProcessResponse(status=exchange.status, body=b"".join(exchange.parts))


class _Exchange:
    """One request and its answer."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            # The next message is a disconnect, and this client never disconnects.
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
