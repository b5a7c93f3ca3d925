"""Protocol through which the scheduler learns that a request's grammar is compiled."""

from typing import Protocol


class GrammarGate(Protocol):
    """Whoever compiles grammars beside the engine's steps."""

    def is_ready(self, request_id: str) -> bool:
        """Whether the request may run now; asked again in every step until it may."""
        ...
