"""`call_app`: runs one request of an ASGI application and yields its messages."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)

# Most messages that wait to be sent to the other process. With more, the application waits.
_MAX_WAITING = 256
# The parts of an ASGI scope that can be sent to another process.
_SCOPE_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


def portable_scope(scope: dict[str, Any]) -> dict[str, Any]:
    """The part of a scope that can be sent to another process."""
    return {name: scope[name] for name in _SCOPE_FIELDS if name in scope}


async def call_app(
    app: ASGIApp, scope: dict[str, Any], body: bytes
) -> AsyncGenerator[list[Message], None]:
    """Yields the messages of the answer, in lists of messages that were ready together.

    Closing the generator cancels the request.

    Args:
        scope: Result of `portable_scope`.
    """
    queue: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_WAITING)
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        # There is no further message: if the client disconnects, the task is cancelled.
        await asyncio.Event().wait()

    async def run() -> None:
        try:
            await app({**scope, "state": {}}, receive, queue.put)
        except Exception:
            # Starlette answers an unexpected error with status 500, and raises it for the log.
            logger.exception("a request failed")
        await queue.put(None)

    task = asyncio.create_task(run())
    try:
        is_complete = False
        while not is_complete:
            messages = [await queue.get()]
            while not queue.empty():
                messages.append(queue.get_nowait())
            if messages[-1] is None:
                is_complete = True
                messages.pop()
            if messages:
                yield messages
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
