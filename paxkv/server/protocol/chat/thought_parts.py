"""Reads the thoughts of earlier answers in all the forms in which clients send them back."""

from collections.abc import Mapping

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.openai_protocol import shorten

# Types of parts with thoughts. Those in the last type are encrypted.
THOUGHT_TYPES = ("thinking", "reasoning", "reasoning_text", "summary_text", "redacted_thinking")
# The first of these fields that a part has contains its text, or further parts.
_FIELDS = ("thinking", "reasoning", "text", "content", "summary")


def thought_text(path: str, value: object) -> str:
    """The text of thoughts, which are a string, a part, or a list of strings and parts.

    {"type": "thinking", "thinking": "hm"} -> "hm". A part without text, such as an encrypted one,
    and None -> "".

    Args:
        path: The value's name in errors.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        # A part may contain further parts in a field, but these must not contain more.
        return "".join(_part_text(f"{path}[{k}]", part) for k, part in enumerate(value))
    return _part_text(path, value)


def _part_text(path: str, part: object) -> str:
    if isinstance(part, Mapping):
        part = next((part[name] for name in _FIELDS if part.get(name)), "")
    if isinstance(part, list):
        texts = [inner.get("text") if isinstance(inner, Mapping) else inner for inner in part]
        part = "".join(texts) if all(isinstance(text, str) for text in texts) else part
    if not isinstance(part, str):
        raise InvalidRequestError(
            f'{path} must be a string or {{"type": "thinking", "thinking": "..."}}, got '
            f"{shorten(part)}.",
            param=path,
        )
    return part
