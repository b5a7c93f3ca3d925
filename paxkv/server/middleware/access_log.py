"""The access log: one line per request, with its durations."""

import logging
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxkv.server.protocol.error_response import CLIENT_CLOSED_REQUEST
from paxkv.server.routes.route_path import route_path

logger = logging.getLogger(__name__)


class AccessLogMiddleware:
    """Logs each request when its answer has ended.

    127.0.0.1:5001 "POST /v1/completions" 200 in 812.4 ms, first byte after 31.0 ms, id 5f0c

    Queries, headers, and targets that are not paths are left out, because they may contain secrets.
    If the client disconnects before its answer begins, the status is 499.

    Args:
        without_paths: Paths that are not logged.
    """

    def __init__(self, app: ASGIApp, *, without_paths: Collection[str] = ()) -> None:
        self._app = app
        self._without_paths = frozenset(without_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in self._without_paths:
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        status, first_byte_s, failure_status = 0, 0.0, CLIENT_CLOSED_REQUEST

        async def send_and_time(message: Message) -> None:
            nonlocal status, first_byte_s
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_byte_s:
                first_byte_s = time.perf_counter()
            await send(message)

        try:
            await self._app(scope, receive, send_and_time)
        except Exception:
            # An outer layer answers it.
            failure_status = 500
            raise
        finally:
            end_s = time.perf_counter()
            logger.info(
                '%s "%s %s" %d in %.1f ms, first byte after %.1f ms, id %s',
                _client(scope),
                scope["method"],
                _raw_path(scope),
                status or failure_status,
                (end_s - start_s) * 1e3,
                ((first_byte_s or end_s) - start_s) * 1e3,
                scope.get("state", {}).get("request_id", "-"),
            )


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return "-" if client is None else f"{client[0]}:{client[1]}"


def _raw_path(scope: Scope) -> str:
    """The path as it was sent. A decoded path could contain line breaks, and forge log lines."""
    raw_path = scope.get("raw_path")
    if raw_path is None:
        return ascii(scope["path"])
    # A target that is not a path, as in CONNECT user:password@host:443, may contain a secret.
    if not raw_path.startswith(b"/") or raw_path.startswith(b"//"):
        return "-"
    return raw_path.decode("ascii", "backslashreplace")
