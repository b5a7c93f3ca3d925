"""Converts `tools` and `tool_choice` of Anthropic's API to the fields of a chat."""

from collections.abc import Mapping, Sequence

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.ignored_parts import is_ignored_tool, record_ignored
from paxkv.server.protocol.openai_protocol import shorten
from paxkv.server.protocol.tool_choice import TOOL_NAME
from paxkv.server.protocol.unsupported_fields import NeutralValues, asks_for_nothing

# Fields that limit who calls a tool, delay loading it, or give examples. All are optional.
TOOL_IGNORED: NeutralValues = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Converts tools. Leaves out tools that Anthropic's server or its clients know by type.

    Raises:
        InvalidRequestError: A tool is malformed.
    """
    return [_chat_tool(k, tool) for k, tool in enumerate(tools) if not is_ignored(tool)]


def is_ignored(tool: Mapping[str, object]) -> bool:
    """Whether Anthropic's server or its clients know a tool by its type."""
    return is_ignored_tool(tool, own_types=("custom",), form="input_schema")


def _chat_tool(k: int, tool: Mapping[str, object]) -> dict[str, object]:
    """{"name": "f", "input_schema": {...}} -> {"type": "function", "function": {...}}"""
    for name, neutral in TOOL_IGNORED.items():
        if not asks_for_nothing(tool.get(name), neutral):
            record_ignored(f"{name} of tools")
    name, schema = tool.get("name"), tool.get("input_schema")
    description = tool.get("description")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tools[{k}].name must have 1 to 128 letters, digits, '_', '-' and '.', got "
            f"{shorten(name)}."
        )
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"tools[{k}].input_schema must be a JSON schema, got {shorten(schema)}."
        )
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"tools[{k}].input_schema.type must be 'object', got {shorten(schema['type'])}."
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(
            f"tools[{k}].description must be a string, got {shorten(description)}."
        )
    function: dict[str, object] = {"name": name}
    if description is not None:
        function["description"] = description
    # An input is an object even if the schema does not say so.
    function["parameters"] = {"type": "object", **schema}
    strict = {} if tool.get("strict") is None else {"strict": tool["strict"]}
    return {"type": "function", "function": function, **strict}


def chat_tool_choice(choice: Mapping[str, object]) -> dict[str, object]:
    """{"type": "any"} -> the fields `tool_choice` and `parallel_tool_calls` of a chat.

    Raises:
        InvalidRequestError: The choice is malformed.
    """
    kind, name = choice.get("type"), choice.get("name")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise InvalidRequestError(
            "tool_choice.disable_parallel_tool_use must be true or false, got "
            f"{shorten(is_single)}."
        )
    if kind == "tool" and isinstance(name, str):
        chosen: object = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise InvalidRequestError(
            'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or '
            f'{{"type": "tool", "name": "..."}}, got {shorten(choice)}.'
        )
    return {"tool_choice": chosen, "parallel_tool_calls": not is_single}
