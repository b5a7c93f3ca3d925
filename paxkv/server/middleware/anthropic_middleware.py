"""Gives every answer below `/v1/messages` the headers and the error format of Anthropic's API.

An error may come from a route, from the router (unknown path or method) or from another
middleware (missing key, headers too large). All of them pass through here.
"""

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxkv.server.protocol.anthropic.errors import anthropic_error
from paxkv.server.protocol.error_response import error_response
from paxkv.server.routes.route_path import is_below, route_path


class AnthropicMiddleware:
    """Translates errors, and repeats the request id in the header that Anthropic's clients read.

    Args:
        path: Applies to this path and the paths below it.
    """

    def __init__(self, app: ASGIApp, *, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_below(route_path(scope), self._path):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["state"]["request_id"], send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.has_begun:
                raise
            await error_response(error)(scope, receive, answer.send)


class _Answer:
    """One HTTP answer, while it is sent."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._request_id = request_id
        self._send = send
        self.has_begun = False
        # The start of an error, until its body is complete.
        self._error_start: Message | None = None
        self._error_body = b""

    async def send(self, message: Message) -> None:
        """Passes a message on; holds an error back until it can be translated."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            MutableHeaders(scope=message)["request-id"] = self._request_id
            if message["status"] >= 400:
                self._error_start = message
                return
        if self._error_start is None:
            await self._send(message)
            return
        self._error_body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_error(self._error_start)

    async def _send_error(self, start: Message) -> None:
        body = self._error_body
        found = anthropic_error(start["status"], body, request_id=self._request_id)
        if found is not None:
            start["status"], translated = found
            body = msgspec.json.encode(translated)
            MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
