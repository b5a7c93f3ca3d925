"""Clients' ids of requests, and the engine's ids that belong to them, for the operator."""

import uuid
from collections import deque
from contextvars import ContextVar

from starlette.requests import Request
from starlette.types import Scope

MAX_NAMES = 1024
MAX_REQUEST_ID_CHARS = 128

# Set by a middleware for the task that serves a request, and inherited by the tasks that it starts,
# one per prompt. The alternative is one more argument of every route.
client_request_id: ContextVar[str] = ContextVar("client_request_id", default="")


def new_request_id() -> str:
    """An id for a request that has none."""
    return uuid.uuid4().hex


def request_id_of(scope: Scope) -> str:
    """The request's id: the client's if it is usable, otherwise a new one.

    The first call stores it in `request.state.request_id`.
    """
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        given = Request(scope).headers.get("x-request-id", "")
        is_usable = given.isascii() and given.isprintable()
        is_usable = is_usable and 0 < len(given) <= MAX_REQUEST_ID_CHARS
        state["request_id"] = given if is_usable else new_request_id()
    return state["request_id"]


class RequestNames:
    """The engine's ids of the latest requests, with the `X-Request-Id` of their calls."""

    def __init__(self) -> None:
        # One limit for all names, because a client may send the same name in every call.
        self._latest: deque[tuple[str, str]] = deque(maxlen=MAX_NAMES)

    def record(self, engine_request_id: str) -> None:
        """Records a request of the current call."""
        self._latest.append((client_request_id.get(), engine_request_id))

    def engine_ids(self, name: str) -> list[str]:
        """The engine's ids of a call, oldest first; none if the name is unknown or too old."""
        return [engine_id for known, engine_id in self._latest if known == name]
