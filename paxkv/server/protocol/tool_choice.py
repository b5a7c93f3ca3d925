"""`tools` and `tool_choice` of a chat: which tools the template shows, how calls are found."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from paxkv.config.server_config import ServerConfig
from paxkv.config.structured_outputs_params import (
    TOOL_ID_PREFIX,
    FormField,
    StructuredOutputsParams,
)
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.field_names import CHAT_NAMES, FieldNames
from paxkv.server.protocol.ignored_parts import is_ignored_tool
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, shorten
from paxkv.server.protocol.structured_fields import with_strictness
from paxkv.text.tool_parsers.forced_call import CallListParser, NamedCallParser
from paxkv.text.tool_parsers.registry import TOOL_PARSERS
from paxkv.text.tool_parsers.tool_parser import ToolParser

# Keywords in the schema of a tool's parameters that say which parameters there are.
_PARAMETER_KEYWORDS = (
    *("properties", "patternProperties", "propertyNames", "required", "minProperties"),
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "enum"),
    *("const", "dependentRequired", "dependentSchemas", "dependencies"),
)
# OpenAI's rule for the names of functions, and dots, which are common.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How a request uses tools.

    Args:
        tools: The tools that the chat template shows; None shows none.
        make_parser: Makes a parser of the calls in one answer; None does not look for calls.
        schema: JSON schema that the whole answer must match; None leaves the form to the model.
        schema_fields: The fields of the request that contain the schema. For a list of calls,
            "tools" and then the field of each tool.
        max_calls: Maximum number of reported calls per answer; None reports all.
        is_named: Whether the request names the function that must be called.
    """

    tools: list[dict[str, object]] | None = None
    make_parser: Callable[[], ToolParser] | None = None
    schema: str | None = None
    schema_fields: tuple[FormField, ...] = ()
    max_calls: int | None = None
    is_named: bool = False

    def form(self) -> StructuredOutputsParams:
        """The structured output of an answer that must call tools.

        Raises:
            InvalidRequestError: The schema is too long.
        """
        return StructuredOutputsParams(json=self.schema, sent_in=self.schema_fields)


def tool_use(
    request: ChatCompletionRequest, config: ServerConfig, names: FieldNames = CHAT_NAMES
) -> ToolUse:
    """Determines how a request uses tools.

    Args:
        names: The client's names for the fields.

    Raises:
        InvalidRequestError: Tools or choice are malformed or do not fit each other, or the server
            was started without a parser of tool calls.
    """
    choice = request.tool_choice
    shown = known_tools(request.tools or ())
    if not shown:
        if choice in (None, "none", "auto"):
            return ToolUse()
        raise InvalidRequestError(
            f"tool_choice needs {names.any_tools}; send some, or leave it out.",
            param="tool_choice",
        )
    tools = checked_tools(request.tools, names)
    fields = _schema_fields(request.tools, names)
    # The other routes put `strict` there. It is for the server, not for the model.
    shown = [{key: tool[key] for key in tool if key != "strict"} for tool in shown]
    max_calls = 1 if request.parallel_tool_calls is False else None
    if choice == "none":
        hides = config.exclude_tools_when_tool_choice_none
        return ToolUse(tools=None if hides else shown)
    if choice in (None, "auto"):
        if not config.enable_auto_tool_choice:
            raise InvalidRequestError(
                f"tool_choice {names.automatic} needs a server that was started with "
                "--enable-auto-tool-choice and --tool-call-parser; add these flags, or send "
                "another tool_choice.",
                param="tool_choice",
            )
        return ToolUse(
            tools=shown,
            make_parser=TOOL_PARSERS[config.tool_call_parser],
            max_calls=max_calls,
        )
    if choice == "required":
        schema = _call_list_schema(tools, max_calls)
        return ToolUse(
            tools=shown,
            make_parser=CallListParser,
            schema=schema,
            schema_fields=(FormField(name="tools"), *fields.values()),
        )
    name = _chosen_name(choice, names)
    if name not in tools:
        raise InvalidRequestError(
            f"tool_choice names {name!r}; tools has {', '.join(tools)}.", param="tool_choice"
        )
    return ToolUse(
        tools=shown,
        make_parser=lambda: NamedCallParser(name),
        schema=_encode(tools[name]),
        schema_fields=(fields[name],),
        is_named=True,
    )


def known_tools(tools: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The tools that are not ignored. The model does not see ignored tools."""
    return [tool for tool in tools if not _is_ignored(tool)]


def checked_tools(
    tools: list[dict[str, object]], names: FieldNames = CHAT_NAMES
) -> dict[str, Mapping[str, object]]:
    """Name of each function -> JSON schema of its arguments, without ignored tools.

    Args:
        names: The client's names for the fields.

    Raises:
        InvalidRequestError: A tool is malformed.
    """
    schemas: dict[str, Mapping[str, object]] = {}
    for k, tool in enumerate(tools):
        if _is_ignored(tool):
            continue
        path = names.tool_path(k)
        function = tool.get("function") if tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise InvalidRequestError(
                f'{path} must be {{"type": "function", "function": {{"name": "...", '
                f'"parameters": {{...}}}}}}, its name of letters, digits, "_", "-" and ".", got '
                f"{shorten(tool)}.",
                param=path,
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequestError(
                f"{path}.{names.tool_schema} must be a JSON schema, got {shorten(parameters)}.",
                param=f"{path}.{names.tool_schema}",
            )
        if name in schemas:
            raise InvalidRequestError(f"tools has {name!r} twice.", param="tools")
        schema = _arguments_schema(f"{path}.{names.tool_schema}", parameters or {})
        strict = function.get("strict") if tool.get("strict") is None else tool["strict"]
        schemas[name] = with_strictness(f"{path}.{names.tool_strict}", schema, strict)
    return schemas


def _schema_fields(tools: list[dict[str, object]], names: FieldNames) -> dict[str, FormField]:
    """Name of each function -> the field with its schema."""
    return {
        name: FormField(name=f"{names.tool_path(k)}.{names.tool_schema}", tool=name)
        for k, tool in enumerate(tools)
        if not _is_ignored(tool)
        for name in (tool["function"]["name"],)
    }


def _is_ignored(tool: Mapping[str, object]) -> bool:
    return is_ignored_tool(tool, own_types=("function",), form="function")


def _arguments_schema(path: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """The schema of a call's arguments, which are always an object.

    A tool that does not describe its parameters has none: its arguments are `{}`.

    Raises:
        InvalidRequestError: The parameters cannot be an object.
    """
    kind = parameters.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f'{path} must be the schema of an object, got "type": {shorten(kind)}; send "type": '
            '"object", with the parameters in "properties".',
            param=path,
        )
    schema = {**parameters, "type": "object"}
    has_parameters = any(schema.get(keyword) for keyword in _PARAMETER_KEYWORDS)
    if not has_parameters and schema.get("additionalProperties") is None:
        schema |= {"properties": {}, "additionalProperties": False}
    return schema


def _chosen_name(choice: object, names: FieldNames) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise InvalidRequestError(
            f'tool_choice must be "none", "auto", "required" or {names.named_choice}, got '
            f"{shorten(choice)}.",
            param="tool_choice",
        )
    return name


def _call_list_schema(tools: Mapping[str, Mapping[str, object]], max_calls: int | None) -> str:
    """The schema of a list of at least one call: [{"name": "f", "parameters": {...}}, ...]."""
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                # References start at the root of a schema. "$id" makes this object such a root.
                "parameters": {**parameters, "$id": f"{TOOL_ID_PREFIX}{name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in tools.items()
    ]
    schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": forms}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return _encode(schema)


def _encode(schema: Mapping[str, object]) -> str:
    return msgspec.json.encode(schema).decode()
