"""Parsers of answers that a grammar restricts to tool calls."""

from paxkv.text.tool_parsers.call_object import CallObject
from paxkv.text.tool_parsers.tool_parser import (
    ArgumentsPart,
    CallStart,
    ToolEvent,
    join_events,
)


class NamedCallParser:
    """Parses an answer that contains only the arguments of the function in `tool_choice`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_started = False

    def feed(self, text: str) -> list[ToolEvent]:
        if not text:
            return []
        events: list[ToolEvent] = [] if self._has_started else [CallStart(0, self._name)]
        self._has_started = True
        return [*events, ArgumentsPart(0, text)]

    def finish(self) -> list[ToolEvent]:
        return []


class CallListParser:
    """Parses an answer that is a JSON array of calls (`tool_choice` is "required")."""

    def __init__(self) -> None:
        self._object: CallObject | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for char in text:
            if self._object is not None:
                events += self._object.feed(char)
                if self._object.is_done or self._object.is_malformed:
                    self._num_calls += self._object.has_started
                    self._object = None
            elif char == "{":
                self._object = CallObject(self._num_calls, needs_arguments=False)
                self._object.feed(char)
        return join_events(events)

    def finish(self) -> list[ToolEvent]:
        return []
