"""`ToolParser`: what all of them do, and what they find."""

import dataclasses
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
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentPart) and isinstance(last, ContentPart):
            joined[-1] = ContentPart(last.text + event.text)
        elif (
            isinstance(event, ArgumentsPart)
            and isinstance(last, ArgumentsPart)
            and event.index == last.index
        ):
            joined[-1] = ArgumentsPart(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
