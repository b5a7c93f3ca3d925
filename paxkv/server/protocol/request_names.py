"""What clients call their requests, and what the engine does: names for the operator."""

from collections import deque
from contextvars import ContextVar

MAX_NAMES = 1024

# Set by the outermost layer for the task that serves a request; every task that it starts, one a
# prompt, inherits it. The alternative is one more argument through every route.
client_request_id: ContextVar[str] = ContextVar("client_request_id", default="")


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
