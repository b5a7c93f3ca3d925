"""`Llama3JsonToolParser`: for answers that are objects `{"name": ..., "parameters": ...}`."""

from paxkv.text.tool_parsers.call_object import CallObject
from paxkv.text.tool_parsers.tool_parser import ContentPart, ToolEvent, join_events

_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonToolParser:
    """An answer is content unless it begins with an object that has a name and parameters."""

    def __init__(self) -> None:
        self._is_content = False
        # Text that may still become content: white space, the tag, separators of calls.
        self._held = ""
        self._object: CallObject | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for idx, char in enumerate(text):
            if self._is_content:
                events.append(ContentPart(text[idx:]))
                break
            events += self._read(char)
        return join_events(events)

    def finish(self) -> list[ToolEvent]:
        call, self._object = self._object, None
        held, self._held = self._held, ""
        if call is not None:
            return [] if call.has_started else [ContentPart(held + call.raw)]
        is_blank = not held or (self._num_calls and not held.strip(_BETWEEN))
        return [] if is_blank else [ContentPart(held)]

    def _read(self, char: str) -> list[ToolEvent]:
        call = self._object
        if call is None:
            return self._read_outside(char)
        events = call.feed(char)
        if call.is_done:
            self._num_calls += 1
            self._object, self._held = None, ""
        elif call.is_malformed:
            self._object = None
            events += self._become_content(self._held + call.raw)
        return events

    def _read_outside(self, char: str) -> list[ToolEvent]:
        begun = self._held.lstrip()
        if char == "{" and begun.strip(_BETWEEN) in ("", _PYTHON_TAG):
            self._object = CallObject(self._num_calls, needs_arguments=True)
            self._object.feed(char)
            return []
        self._held += char
        is_between = char in (_BETWEEN if self._num_calls else _BETWEEN[:4])
        if is_between or _PYTHON_TAG.startswith(self._held.strip(_BETWEEN)):
            return []
        return self._become_content(self._held)

    def _become_content(self, text: str) -> list[ToolEvent]:
        self._is_content, self._held = True, ""
        return [ContentPart(text)]
