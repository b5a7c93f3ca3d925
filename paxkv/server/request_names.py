"""What clients call their requests, and what the engine does: names for the operator."""

from contextvars import ContextVar

MAX_NAMES = 1024

# Set by the outermost layer for the task that serves a request; every task that it starts, one a
# prompt, inherits it. The alternative is one more argument through every route.
client_request_id: ContextVar[str] = ContextVar("client_request_id", default="")


class RequestNames:
    """The engine's ids of the latest requests, by the `X-Request-Id` that they came with."""

    def __init__(self) -> None:
        self._engine_ids: dict[str, list[str]] = {}

    def note(self, engine_request_id: str) -> None:
        """Notes a request of the call that is being served."""
        name = client_request_id.get()
        self._engine_ids.setdefault(name, []).append(engine_request_id)
        if len(self._engine_ids) > MAX_NAMES:
            del self._engine_ids[next(iter(self._engine_ids))]

    def engine_ids(self, name: str) -> list[str]:
        """In the order in which they were sent; none where the name is not known, or no more."""
        return list(self._engine_ids.get(name, ()))
