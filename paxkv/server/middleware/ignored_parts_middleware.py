"""Names ignored parts of requests in a header of the answer, and logs each name once."""

import logging

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxkv.server.protocol.ignored_parts import IgnoredParts, ignored_parts

IGNORED_HEADER = "X-Paxkv-Ignored"
# Limits memory and log lines, because clients choose some of the names.
MAX_LOGGED_NAMES = 256
_logger = logging.getLogger(__name__)


class IgnoredPartsMiddleware:
    """Adds the header to answers of requests whose parts were ignored."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ignored = IgnoredParts()
        ignored_parts.set(ignored)

        async def send_with_names(message: Message) -> None:
            if message["type"] == "http.response.start" and (header := ignored.header()):
                MutableHeaders(scope=message)[IGNORED_HEADER] = header
                # Without keywords of schemas, which the process that compiles grammars logs.
                self._log(ignored.names)
            await send(message)

        await self._app(scope, receive, send_with_names)

    def _log(self, names: list[str]) -> None:
        new_names = [name for name in names if name not in self._logged]
        if not new_names or len(self._logged) >= MAX_LOGGED_NAMES:
            return
        self._logged.update(new_names)
        _logger.warning(
            "requests have parts that this server ignores: %s. They are logged once; every answer "
            "names them in the header %s.",
            ", ".join(new_names),
            IGNORED_HEADER,
        )
