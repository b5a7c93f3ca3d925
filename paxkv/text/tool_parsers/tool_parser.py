"""`ToolParser`: what all of them do, and what they find."""

import dataclasses
import itertools
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ContentPart:
    """Text that is no call."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called; its arguments follow.

    Args:
        index: Its place among the calls of the answer.
    """

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """The next piece of the arguments' JSON text of call `index`."""

    index: int
    text: str


ToolEvent = ContentPart | CallStart | ArgumentsPart


class ToolParser(Protocol):
    """Reads one answer. However its text is cut into pieces, the same is found in it.

    Arguments are handed on as the model wrote them, also where they are no valid JSON.
    """

    def feed(self, text: str) -> list[ToolEvent]:
        """What the next piece of text makes certain."""
        ...

    def finish(self) -> list[ToolEvent]:
        """What was held back, when no more text comes."""
        ...


def join_events(events: list[ToolEvent]) -> list[ToolEvent]:
    """The same with neighbours of one kind put together: "a", "b" -> "ab"."""
    joined: list[ToolEvent] = []
    # A long answer that comes at once is an event a character.
    for (kind, index), run in itertools.groupby(events, key=_kind_and_call):
        if kind is CallStart:
            joined += run
        else:
            text = "".join(event.text for event in run)
            joined.append(ContentPart(text) if index is None else ArgumentsPart(index, text))
    return joined


def _kind_and_call(event: ToolEvent) -> tuple[type, int | None]:
    return type(event), None if isinstance(event, ContentPart) else event.index
