"""Layers for every route: proxy's path prefix, request id, limit on headers, disconnects."""

import asyncio
import re
from urllib.parse import unquote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxkv.server.protocol.error_response import HeadersTooLargeError, error_response
from paxkv.server.protocol.request_names import client_request_id, request_id_of

_WHOLE_URL = re.compile(rb"https?://[^/]*(.*)", re.IGNORECASE | re.DOTALL)


class RootPathMiddleware:
    """Sets `root_path`, the path prefix that a proxy puts before all paths of this server.

    Some proxies remove the prefix and some do not, so requests may have it or not, as in vLLM.
    uvicorn's own setting would add it to all of them. A client that uses this server as a proxy
    sends a whole URL instead of a path; HTTP requires that servers accept it.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        url = _WHOLE_URL.fullmatch(scope.get("raw_path", b""))
        if url is not None:
            raw_path = url[1] or b"/"
            scope.update(raw_path=raw_path, path=unquote(raw_path.decode("ascii")))
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Puts a request id into `request.state.request_id` and into the response.

    A client may send its own id in `X-Request-Id`. It is only a name: the engine gets fresh ids, so
    two requests may send the same one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        client_request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeaderLimitMiddleware:
    """Answers 431 to a request whose first line and headers are too long, or too many.

    h11 limits only headers that are still incomplete. It accepts any size that arrives at once.
    """

    def __init__(
        self, app: ASGIApp, *, max_header_bytes: int, max_header_count: int | None = None
    ) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_header_count = max_header_count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        excess = self._excess(scope) if scope["type"] == "http" else None
        if excess is not None:
            error = HeadersTooLargeError(excess)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _excess(self, scope: Scope) -> str | None:
        """A sentence about the limit that is exceeded; None if there is none."""
        if _num_header_bytes(scope) > self._max_header_bytes:
            return f"the request's first line and headers are over {self._max_header_bytes} bytes."
        most, num_headers = self._max_header_count, len(scope["headers"])
        if most is not None and num_headers > most:
            return f"the request has {num_headers} headers; this server takes at most {most}."
        return None


def _num_header_bytes(scope: Scope) -> int:
    # 4 bytes are ": " and the line break of each header.
    num_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return num_bytes + len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))


class DisconnectMiddleware:
    """Cancels the handler when the client disconnects, whatever the handler is waiting for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await _Exchange(receive, send).run(self._app, scope)


class _Exchange:
    """One request and its response. After the handler has read the body, the watcher receives."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._body_is_read = asyncio.Event()
        self._response_is_sent = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        handler = asyncio.ensure_future(app(scope, self._receive_body, self._send_and_check))
        watcher = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait({handler, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            # A disconnect is also reported after the last byte. Then the handler may clean up.
            if not self._response_is_sent:
                handler.cancel()
            await asyncio.gather(handler, watcher, return_exceptions=True)
        if not handler.cancelled():
            handler.result()

    async def _receive_body(self) -> Message:
        if self._body_is_read.is_set():
            # Only the watcher receives now. On a disconnect, it ends the handler that waits here.
            await asyncio.Event().wait()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._body_is_read.set()
        return message

    async def _wait_for_disconnect(self) -> None:
        await self._body_is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _send_and_check(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self._response_is_sent = self._response_is_sent or is_last
        await self._send(message)
