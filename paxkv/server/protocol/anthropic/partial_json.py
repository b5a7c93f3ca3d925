"""Reads the complete part of JSON that was cut off."""

import msgspec

_ENDS = {"{": "}", "[": "]"}


def complete_part(text: str) -> object:
    """The value of JSON text that ends early, without the member or element that was cut.

    '{"a": 1, "b": [2, {"c": "x' -> {"a": 1, "b": [2, {}]}. Anthropic's clients read a stream in the
    same way.

    Returns:
        None if the text does not begin an object or a list, or is not JSON.
    """
    for candidate in _candidates(text):
        try:
            return msgspec.json.decode(candidate)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return None


def _candidates(text: str) -> tuple[str, str]:
    """The text, and the text up to its last certain value, with all objects and lists closed."""
    open_ends: list[str] = []
    # Where the certain part ends. Nothing opens or closes after it.
    end = 0
    in_string = is_escaped = False
    for position, letter in enumerate(text):
        if in_string:
            in_string = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter == '"':
            in_string = True
        elif letter == ",":
            end = position
        elif letter in "{[}]":
            if letter in _ENDS:
                open_ends.append(_ENDS[letter])
            elif open_ends:
                open_ends.pop()
            end = position + 1
    ends = "".join(reversed(open_ends))
    return text + ends, text[:end] + ends
