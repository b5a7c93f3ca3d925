"""`HermesToolParser`: parses calls like `<tool_call>{"name": ...}</tool_call>`, as Qwen's."""

from paxkv.text.tool_parsers.call_object import CallObject
from paxkv.text.tool_parsers.tag_finder import num_held_chars
from paxkv.text.tool_parsers.tool_parser import ContentPart, ToolEvent, join_events

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """Text before the first call is content; white space between calls is dropped."""

    def __init__(self) -> None:
        # Undecided text: the start of a tag, or white space after a call.
        self._held = ""
        self._object: CallObject | None = None
        self._num_calls = 0
        # Whether the parser is between the end of a call's object and the closing tag.
        self._is_after_object = False

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for char in text:
            if self._object is not None:
                events += self._read_in_object(char)
            else:
                self._held += char
                events += self._read_outside()
        return join_events(events)

    def finish(self) -> list[ToolEvent]:
        call, self._object = self._object, None
        held, self._held = self._held, ""
        if call is not None and not call.has_started:
            return [ContentPart(_OPEN + call.raw)]
        is_blank = not held or (self._num_calls and not held.strip())
        return [] if is_blank else [ContentPart(held)]

    def _read_in_object(self, char: str) -> list[ToolEvent]:
        call = self._object
        # JSON has no "<" outside strings, so this is the closing tag of an incomplete object.
        if char == "<" and call.has_started and not call.is_in_string:
            self._end_call()
            self._held = char
            return []
        events = call.feed(char)
        if call.is_done:
            self._end_call()
        elif call.is_malformed:
            # The object is content, in which another tag may begin.
            self._object = None
            events += [ContentPart(_OPEN), *self.feed(call.raw)]
        return events

    def _end_call(self) -> None:
        self._num_calls += 1
        self._object, self._is_after_object = None, True

    def _read_outside(self) -> list[ToolEvent]:
        held = self._held
        if held.endswith(_OPEN):
            self._held, self._is_after_object = "", False
            self._object = CallObject(self._num_calls, needs_arguments=False)
            text = held[: -len(_OPEN)]
            is_blank = not text or (self._num_calls and not text.strip())
            return [] if is_blank else [ContentPart(text)]
        if self._is_after_object and held.endswith(_CLOSE):
            self._held, self._is_after_object = "", False
            return []
        tags = (_OPEN, _CLOSE) if self._is_after_object else (_OPEN,)
        num_held = max(num_held_chars(held, tag) for tag in tags)
        text = held[: len(held) - num_held]
        # White space after a call is held until other text follows.
        if not text or (self._num_calls and not text.strip()):
            return []
        self._held = held[len(text) :]
        return [ContentPart(text)]
