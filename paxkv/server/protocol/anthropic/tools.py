"""`tools` and `tool_choice` of Anthropic's API as a chat's."""

from collections.abc import Mapping

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.openai_protocol import shorten
from paxkv.server.protocol.tool_choice import TOOL_NAME
from paxkv.server.protocol.unsupported_fields import NeutralValues, refuse_unsupported

TOOL_FIELDS: NeutralValues = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tool(k: int, tool: Mapping[str, object]) -> dict[str, object]:
    """{"name": "f", "input_schema": {...}} -> {"type": "function", "function": {...}}

    Args:
        k: Index of the tool in `tools`.

    Raises:
        InvalidRequestError: The tool is malformed, or is one that Anthropic's servers run.
    """
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedFeatureError(
            f"tools[{k}].type is {shorten(kind)}; this server knows custom tools only. Leave type "
            "out and send name, description and input_schema."
        )
    refuse_unsupported(tool, TOOL_FIELDS, path=f"tools[{k}].")
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
    return {"type": "function", "function": function}


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
