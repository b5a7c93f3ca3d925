"""What clients call their requests, and what the engine does: names for the operator."""

import uuid
from collections import deque
from contextvars import ContextVar

from starlette.requests import Request
from starlette.types import Scope

MAX_NAMES = 1024
MAX_REQUEST_ID_CHARS = 128

# Set by the outermost layer for the task that serves a request; every task that it starts, one a
# prompt, inherits it. The alternative is one more argument through every route.
client_request_id: ContextVar[str] = ContextVar("client_request_id", default="")


def new_request_id() -> str:
    """An id for a request that brought none."""
    return uuid.uuid4().hex


def request_id_of(scope: Scope) -> str:
    """The request's id, which the first call decides: the client's if it is usable, or a new one.

    It is kept in `request.state.request_id`.
    """
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        given = Request(scope).headers.get("x-request-id", "")
        is_usable = given.isascii() and given.isprintable()
        is_usable = is_usable and 0 < len(given) <= MAX_REQUEST_ID_CHARS
        state["request_id"] = given if is_usable else new_request_id()
    return state["request_id"]


class RequestNames:
    """The engine's ids of the latest requests, by the `X-Request-Id` that they came with."""

    def __init__(self) -> None:
        # Bounded as a whole: a client may send the same name for ever.
        self._latest: deque[tuple[str, str]] = deque(maxlen=MAX_NAMES)

    def note(self, engine_request_id: str) -> None:
        """Notes a request of the call that is being served."""
        self._latest.append((client_request_id.get(), engine_request_id))

    def engine_ids(self, name: str) -> list[str]:
        """In the order in which they were sent; none where the name is not known, or no more."""
        return [engine_id for known, engine_id in self._latest if known == name]
