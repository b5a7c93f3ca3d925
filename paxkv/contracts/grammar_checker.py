"""Protocol through which requests with a grammar are checked before they are sent."""

from typing import Protocol

from paxkv.config.structured_outputs_params import StructuredOutputsParams


class GrammarChecker(Protocol):
    """Whoever knows which grammars can be compiled."""

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """Whether `check` answers at once."""
        ...

    def is_heavy(self, params: StructuredOutputsParams) -> bool:
        """Whether one that was checked took longer than `check_quickly` waits."""
        ...

    def check_quickly(self, params: StructuredOutputsParams) -> bool:
        """Gives up soon; False where that leaves it open whether `check` would pass.

        Raises:
            InvalidRequestError: As `check`.
        """
        ...

    def check(self, params: StructuredOutputsParams) -> None:
        """May take seconds: call it in a thread.

        Raises:
            InvalidRequestError: The grammar cannot be compiled; the message says why.
        """
        ...

    def close(self) -> None:
        """Checks nothing more; who waits for a check gets EngineDeadError."""
        ...
