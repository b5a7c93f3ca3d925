"""`CallObject`: reads `{"name": "f", "arguments": {...}}` character by character."""

import enum
import json

from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, CallStart, ToolEvent

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _State(enum.Enum):
    """The part of the object to which the next character belongs."""

    BEFORE_OBJECT = enum.auto()
    BEFORE_KEY = enum.auto()
    KEY = enum.auto()
    BEFORE_COLON = enum.auto()
    BEFORE_VALUE = enum.auto()
    STRING = enum.auto()
    NESTED = enum.auto()
    BARE = enum.auto()
    AFTER_VALUE = enum.auto()
    DONE = enum.auto()
    MALFORMED = enum.auto()


class CallObject:
    """Parses one object. As soon as the name is known, it emits arguments character by character.

    Args:
        index: Index of the call in the answer.
        needs_arguments: An object without arguments is not a call.

    Attributes:
        has_started: Whether `CallStart` has been emitted, so the object is certainly a call.
    """

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self._index = index
        self._needs_arguments = needs_arguments
        self._state = _State.BEFORE_OBJECT
        self._key = ""
        # The text of the current value or key.
        self._value: list[str] = []
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._name: str | None = None
        # Arguments that preceded the name.
        self._early_arguments: str | None = None
        self._has_arguments = False
        self._chars: list[str] = []
        self.has_started = False

    @property
    def raw(self) -> str:
        """All characters up to the start of the call."""
        return "".join(self._chars)

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def is_in_string(self) -> bool:
        """Whether the next character is part of a string's value."""
        return self._is_in_string

    @property
    def is_malformed(self) -> bool:
        """Whether the object is certainly not a call. Never True after the call has started."""
        return self._state is _State.MALFORMED

    def feed(self, char: str) -> list[ToolEvent]:
        """Reads the next character. Must not be called after the object's end."""
        if not self.has_started:
            self._chars.append(char)
        events = self._read(char)
        # `CallStart` has been emitted, so the text must remain a call. Continue with the next key.
        if self.is_malformed and self.has_started:
            self._state = _State.BEFORE_KEY
        return events

    def _read(self, char: str) -> list[ToolEvent]:
        match self._state:
            case _State.STRING | _State.NESTED | _State.BARE:
                return self._read_in_value(char)
            case _State.KEY:
                self._read_in_key(char)
                return []
            case _State.BEFORE_VALUE if char not in _SPACE:
                return self._begin_value(char)
            case _State.BEFORE_VALUE:
                return []
        return self._read_between(char)

    def _read_between(self, char: str) -> list[ToolEvent]:
        if char in _SPACE:
            return []
        if self._state is _State.BEFORE_OBJECT and char == "{":
            self._state = _State.BEFORE_KEY
        elif self._state is _State.BEFORE_KEY and char == '"':
            self._state, self._value, self._is_escaped = _State.KEY, [char], False
        elif self._state is _State.BEFORE_COLON and char == ":":
            self._state = _State.BEFORE_VALUE
        elif self._state is _State.AFTER_VALUE and char == ",":
            self._state = _State.BEFORE_KEY
        elif self._state in (_State.BEFORE_KEY, _State.AFTER_VALUE) and char == "}":
            return self._end_object()
        else:
            self._state = _State.MALFORMED
        return []

    def _read_in_key(self, char: str) -> None:
        self._value.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            key = _decode_string("".join(self._value))
            self._state = _State.MALFORMED if key is None else _State.BEFORE_COLON
            self._key = key or ""

    def _begin_value(self, char: str) -> list[ToolEvent]:
        self._value = []
        self._depth, self._is_in_string, self._is_escaped = 0, False, False
        if char in "}],:":
            self._state = _State.MALFORMED
            return []
        if char == '"':
            self._state = _State.STRING
        elif char in "{[":
            self._state = _State.NESTED
        else:
            self._state = _State.BARE
        events = []
        if self._is_arguments_value() and self._name is not None:
            events = self._start_call()
        return events + self._read_in_value(char)

    def _read_in_value(self, char: str) -> list[ToolEvent]:
        if self._state is _State.BARE and (char in _SPACE or char in ",}"):
            events = self._end_value()
            return events + ([] if self.is_malformed else self._read_between(char))
        self._track_nesting(char)
        events: list[ToolEvent] = []
        if self._streams_arguments():
            events.append(ArgumentsPart(self._index, char))
        else:
            self._value.append(char)
        is_open = self._depth > 0 or self._is_in_string
        if self._state is not _State.BARE and not is_open:
            events += self._end_value()
        return events

    def _track_nesting(self, char: str) -> None:
        """Updates the depth of brackets outside strings."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
        elif char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_value(self) -> list[ToolEvent]:
        self._state = _State.AFTER_VALUE
        if self._streams_arguments():
            self._has_arguments = True
            return []
        text = "".join(self._value)
        if self._key == "name" and self._name is None:
            self._name = _decode_string(text)
            if not self._name:
                self._state = _State.MALFORMED
                return []
            if self._early_arguments is not None:
                return [*self._start_call(), ArgumentsPart(self._index, self._early_arguments)]
        elif self._is_arguments_value():
            self._early_arguments = text
            self._has_arguments = True
        return []

    def _end_object(self) -> list[ToolEvent]:
        if self._name is None or (self._needs_arguments and not self._has_arguments):
            self._state = _State.MALFORMED
            return []
        self._state = _State.DONE
        if self.has_started:
            return []
        return [*self._start_call(), ArgumentsPart(self._index, "{}")]

    def _start_call(self) -> list[ToolEvent]:
        self.has_started = True
        return [CallStart(self._index, self._name or "")]

    def _is_arguments_value(self) -> bool:
        # Only the first arguments of an object count.
        return self._key in _ARGUMENT_KEYS and not self._has_arguments

    def _streams_arguments(self) -> bool:
        return self.has_started and self._is_arguments_value()


def _decode_string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    # An answer cannot contain half of a surrogate pair.
    has_halves = isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)
    return value if isinstance(value, str) and not has_halves else None
