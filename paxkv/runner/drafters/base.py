"""The interface of drafters on the host.

To add a drafter, write a class in a file of this folder, and add it to `drafter_list.py`. A drafter
proposes tokens from the tokens of requests alone. It sees neither the model nor the step. Its
proposals only change how many steps an answer takes, because a step verifies each draft.
"""

from collections.abc import Sequence
from typing import Protocol


class RequestDrafter(Protocol):
    """The drafter's state of one request."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that were drawn for the request."""
        ...

    def propose(self, max_drafts: int) -> list[int]:
        """Proposes up to `max_drafts` tokens that follow the request's tokens; none if unknown."""
        ...


class Drafter(Protocol):
    """Makes the state of each request. An engine has one drafter for its whole life."""

    def start(self, token_ids: Sequence[int]) -> RequestDrafter:
        """Returns the state of a request with these prompt and output tokens."""
        ...

    def end(self, request: RequestDrafter) -> None:
        """Called when a request has ended, but not when it is preempted."""
        ...
