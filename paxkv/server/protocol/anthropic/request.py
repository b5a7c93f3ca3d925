"""The request body of POST /v1/messages, and its conversion to a chat."""

import dataclasses
from collections.abc import Mapping

import msgspec

from paxkv.config.sampling_params import check_stop_sizes
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.anthropic.messages import chat_messages_of
from paxkv.server.protocol.anthropic.tools import chat_tool_choice, chat_tools, is_ignored
from paxkv.server.protocol.field_names import FieldNames
from paxkv.server.protocol.ignored_parts import record_ignored_fields
from paxkv.server.protocol.json_body import convert_fields
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, parse_chat, shorten
from paxkv.server.protocol.sampling_fields import MAX_MAX_TOKENS, check_range
from paxkv.server.protocol.unsupported_fields import NeutralValues, refuse_unsupported

# Fields of Anthropic's and vLLM's APIs that are not supported.
MESSAGES_FIELDS: NeutralValues = {
    "inference_geo": ("global",),
    # Of vLLM.
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "return_mm_kwargs": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
# Fields that are ignored: agents send them with every request, and answers are useful without them.
MESSAGES_IGNORED: NeutralValues = {
    "betas": ([],),
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        # Keeps everything, as this server does.
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": ({},),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
# Fields that have the same name and meaning in a chat.
_SAME_NAMES = (
    "model",
    "stream",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
)
# Without `params`, because errors of this API have no `param`.
_NAMES = FieldNames(
    tool_schema="input_schema",
    tool_strict="strict",
    any_tools="tools with a name and an input_schema",
    automatic='{"type": "auto"}',
    named_choice='{"type": "tool", "name": "..."}',
)
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("enabled", "adaptive", "disabled")
_THINKING_DISPLAYS = ("summarized", "omitted")


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens: everything that changes the prompt."""

    model: str | None = None
    messages: list[dict[str, object]]
    system: str | list[object] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    output_config: dict[str, object] | None = None
    # The earlier name of `output_config.format`.
    output_format: dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    # No effect: the server finds cached prefixes without marks.
    cache_control: dict[str, object] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    # Anthropic stores or groups its customers' requests by these. They do not affect answers.
    metadata: dict[str, object] | None = None
    service_tier: str | None = None


def parse_messages(
    fields: Mapping[str, object],
) -> tuple[MessagesRequest, ChatCompletionRequest]:
    """Converts a JSON object to a request, and to the chat that answers it.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or is not supported.
    """
    refuse_unsupported(fields, MESSAGES_FIELDS)
    record_ignored_fields(fields, MESSAGES_IGNORED)
    request = convert_fields(fields, MessagesRequest)
    check_range("max_tokens", request.max_tokens, low=1, high=MAX_MAX_TOKENS)
    chat = _prompt_fields(request)
    chat |= {name: fields[name] for name in _SAME_NAMES if name in fields}
    stops = request.stop_sequences or []
    if not all(stops):
        raise InvalidRequestError("stop_sequences must not contain an empty string.")
    check_stop_sizes("stop_sequences", stops)
    chat["stop"] = stops
    chat["response_format"] = _response_format(request)
    return request, parse_chat(chat)


def parse_count_tokens(
    fields: Mapping[str, object],
) -> tuple[CountTokensRequest, ChatCompletionRequest]:
    """Converts a JSON object to a request, and to the chat whose prompt is counted.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or is not supported.
    """
    refuse_unsupported(fields, MESSAGES_FIELDS)
    record_ignored_fields(fields, MESSAGES_IGNORED)
    request = convert_fields(fields, CountTokensRequest)
    return request, parse_chat(_prompt_fields(request) | {"model": request.model})


def messages_names(request: CountTokensRequest) -> FieldNames:
    """The client's names for the fields of the chat."""
    name, _ = _form(request)
    names = dataclasses.replace(
        _NAMES, form=name, form_schema=f"{name}.schema", form_strict=f"{name}.strict"
    )
    return names.with_tools(request.tools, is_ignored)


def _prompt_fields(request: CountTokensRequest) -> dict[str, object]:
    """The fields of a chat that determine its prompt."""
    messages = chat_messages_of(request.messages, request.system)
    chat: dict[str, object] = {"messages": messages}
    # As in Anthropic's API, the answer continues the assistant's last message.
    if messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls"):
            raise InvalidRequestError(
                "the last message has tool_use blocks without results; add a user message with a "
                "tool_result block for each of them."
            )
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools is not None:
        chat["tools"] = chat_tools(request.tools)
    if request.tool_choice is not None:
        chat |= chat_tool_choice(request.tool_choice)
    chat["reasoning_effort"] = _effort(request.output_config)
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        _check_thinking(request.thinking)
        is_enabled = request.thinking["type"] != "disabled"
        template_kwargs.setdefault("enable_thinking", is_enabled)
        chat["include_reasoning"] = request.thinking.get("display") != "omitted"
    chat["chat_template_kwargs"] = template_kwargs
    return chat


def _check_thinking(thinking: Mapping[str, object]) -> None:
    kind, display = thinking.get("type"), thinking.get("display")
    if kind not in _THINKING_TYPES:
        raise UnsupportedFeatureError(
            f"thinking.type must be one of {', '.join(_THINKING_TYPES)}, got {shorten(kind)}."
        )
    if display is not None and display not in _THINKING_DISPLAYS:
        raise UnsupportedFeatureError(
            f"thinking.display must be one of {', '.join(_THINKING_DISPLAYS)}, got "
            f"{shorten(display)}."
        )
    # Only advice to the model, as in Anthropic's API: `max_tokens` is the limit.
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidRequestError(
            f"thinking.budget_tokens must be a number from 1 on, got {shorten(budget)}."
        )


def _effort(output_config: Mapping[str, object] | None) -> object:
    effort = (output_config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequestError(
            f"output_config.effort must be one of {', '.join(_EFFORTS)}, got {shorten(effort)}."
        )
    return effort


def _form(request: CountTokensRequest) -> tuple[str, object]:
    """The field with the requested form, and the form."""
    form = (request.output_config or {}).get("format")
    if form is None and request.output_format is not None:
        return "output_format", request.output_format
    return "output_config.format", form


def _response_format(request: CountTokensRequest) -> dict[str, object] | None:
    """{"type": "json_schema", "schema": {}} -> a chat's `response_format`."""
    name, form = _form(request)
    if form is None:
        return None
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if not isinstance(schema, Mapping) or form.get("type") != "json_schema":
        raise InvalidRequestError(
            f'{name} must be {{"type": "json_schema", "schema": {{...}}}}, got {shorten(form)}.'
        )
    return {"type": "json_schema", "json_schema": {"schema": schema}}
