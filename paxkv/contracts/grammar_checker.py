"""Protocol through which requests with a grammar are checked before they are sent."""

from typing import Protocol

from paxkv.structured_outputs_params import StructuredOutputsParams


class GrammarChecker(Protocol):
    """Whoever knows which grammars can be compiled."""

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """Whether `check` answers at once."""
        ...

    def check(self, params: StructuredOutputsParams) -> None:
        """Takes up to some hundred milliseconds: call it in a thread.

        Raises:
            InvalidRequestError: The grammar cannot be compiled; the message says why.
        """
        ...
