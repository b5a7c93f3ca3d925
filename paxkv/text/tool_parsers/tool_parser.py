"""`ToolParser`: the interface of tool parsers, and the events that they emit."""

import dataclasses
import itertools
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ContentPart:
    """Text that is not part of a tool call."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call; its arguments follow.

    Args:
        index: Index of the call in the answer.
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
    """Parses one answer. The result does not depend on how the text is cut into pieces.

    Arguments are emitted as the model wrote them, even if they are not valid JSON.
    """

    def feed(self, text: str) -> list[ToolEvent]:
        """Reads the next piece of text; returns the events that are now certain."""
        ...

    def finish(self) -> list[ToolEvent]:
        """Ends the answer; returns the events of text that was held."""
        ...


def join_events(events: list[ToolEvent]) -> list[ToolEvent]:
    """Joins consecutive events of the same kind: "a", "b" -> "ab"."""
    joined: list[ToolEvent] = []
    # A long piece of text produces one event per character.
    for (kind, index), run in itertools.groupby(events, key=_kind_and_call):
        if kind is CallStart:
            joined += run
        else:
            text = "".join(event.text for event in run)
            joined.append(ContentPart(text) if index is None else ArgumentsPart(index, text))
    return joined


def _kind_and_call(event: ToolEvent) -> tuple[type, int | None]:
    return type(event), None if isinstance(event, ContentPart) else event.index
