"""The body of POST /v1/responses, and the chat that it asks for."""

from collections.abc import Mapping

import msgspec

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.json_body import convert_fields
from paxkv.server.openai_protocol import ChatCompletionRequest, parse_chat, shorten
from paxkv.server.unsupported_fields import RESPONSES_FIELDS, refuse_unsupported

# Fields that a chat has under the same name, with the same meaning.
_SAME_NAMES = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "request_id",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "structured_outputs",
)


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are told again in the answer, or mean something here alone."""

    input: str | list[dict[str, object]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, object] | None = None
    reasoning: dict[str, object] | None = None
    metadata: dict[str, object] | None = None
    user: str | None = None
    # Nothing is stored, whatever it says: the answer says so.
    store: bool | None = None


def parse_responses(fields: Mapping[str, object]) -> tuple[ResponsesRequest, ChatCompletionRequest]:
    """The request that a JSON object describes, and the chat that answers it.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or cannot be honoured.
    """
    refuse_unsupported(fields, RESPONSES_FIELDS)
    request = convert_fields(fields, ResponsesRequest)
    chat: dict[str, object] = {name: fields[name] for name in _SAME_NAMES if name in fields}
    chat["messages"] = _messages(request)
    chat["max_completion_tokens"] = request.max_output_tokens
    if request.tools is not None:
        chat["tools"] = [_chat_tool(k, tool) for k, tool in enumerate(request.tools)]
    chat["tool_choice"] = _chat_tool_choice(request.tool_choice)
    chat["response_format"] = _response_format(request.text)
    chat["reasoning_effort"] = (request.reasoning or {}).get("effort")
    return request, parse_chat(chat)


def _messages(request: ResponsesRequest) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input must not be empty.", param="input")
    thought: str | None = None
    for k, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            messages.append(message | _thought(thought))
        elif kind == "function_call":
            _add_call(f"input[{k}]", messages, item, thought)
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output"),
                }
            )
        elif kind != "reasoning":
            raise UnsupportedFeatureError(
                f"input[{k}].type is {shorten(kind)}; this server reads message, function_call, "
                "function_call_output and reasoning.",
                param="input",
            )
        thought = _reasoning_text(item) if kind == "reasoning" else None
    return messages


def _add_call(
    path: str, messages: list[dict[str, object]], item: Mapping[str, object], thought: str | None
) -> None:
    """Adds a call to the assistant's last message, or to a new one."""
    if not isinstance(item.get("name"), str):
        raise InvalidRequestError(f"{path}.name must be a string.", param="input")
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": item.get("arguments")},
    }
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
        return
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages.append(message | _thought(thought))


def _reasoning_text(item: Mapping[str, object]) -> str | None:
    parts = item.get("content")
    texts = [p.get("text") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str)) or None


def _thought(thought: str | None) -> dict[str, str]:
    return {} if thought is None else {"reasoning": thought}


def _chat_tool(k: int, tool: Mapping[str, object]) -> dict[str, object]:
    """{"type": "function", "name": "f", ...} -> {"type": "function", "function": {...}}"""
    if tool.get("type") != "function":
        raise UnsupportedFeatureError(
            f"tools[{k}].type is {shorten(tool.get('type'))}; this server knows functions only.",
            param="tools",
        )
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | Mapping[str, object] | None) -> object:
    if not isinstance(choice, Mapping):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(text: Mapping[str, object] | None) -> object:
    """{"format": {"type": "json_schema", "schema": {}}} -> a chat's `response_format`."""
    form = (text or {}).get("format")
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
