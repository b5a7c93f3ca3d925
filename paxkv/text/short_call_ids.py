"""Ids of tool calls for templates such as Mistral's, which accept only ids of nine characters."""

import re
from collections.abc import Mapping

NUM_CHARS = 9
# Finds checks such as {% if tool_call.id | length != 9 %}.
_CHECK = re.compile(rf"(?<![a-zA-Z])id[\"'\])]*\s*\|\s*length\s*!=\s*{NUM_CHARS}\b")


def needs_short_ids(source: str) -> bool:
    """Whether a template rejects ids that do not have nine characters."""
    return _CHECK.search(source) is not None


def with_short_ids(message: Mapping[str, object]) -> dict[str, object]:
    """Shortens the ids of the tool calls in a message, or the `tool_call_id` of a tool's result.

    A call and its result get the same id.
    """
    shortened = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        shortened["tool_call_id"] = short_id(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        shortened["tool_calls"] = [_with_short_id(call) for call in message["tool_calls"]]
    return shortened


def _with_short_id(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("id"), str):
        return call
    return {**call, "id": short_id(call["id"])}


def short_id(call_id: str) -> str:
    """The last nine letters and digits of an id, which are random: "call_a1B2c3D4e5" ->
    "1B2c3D4e5". Shorter ids are filled with leading zeros.
    """
    letters = "".join(char for char in call_id if char.isascii() and char.isalnum())
    return letters[-NUM_CHARS:].rjust(NUM_CHARS, "0")
