"""The request body of POST /v1/responses, and its conversion to a chat."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.chat.chat_messages import ROLES, chat_message, tool_content
from paxkv.server.protocol.field_names import FieldNames
from paxkv.server.protocol.ignored_parts import (
    is_ignored_tool,
    record_ignored,
    record_ignored_fields,
)
from paxkv.server.protocol.json_body import convert_fields
from paxkv.server.protocol.openai_protocol import (
    ChatCompletionRequest,
    ReasoningEffort,
    parse_chat,
    shorten,
)
from paxkv.server.protocol.sampling_fields import MAX_MAX_TOKENS, check_range
from paxkv.server.protocol.tool_choice import TOOL_NAME
from paxkv.server.protocol.unsupported_fields import (
    RESPONSES_FIELDS,
    RESPONSES_IGNORED,
    refuse_unsupported,
)

# Fields that have the same name and meaning in a chat.
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
    "include_stop_str_in_output",
    "priority",
    "request_id",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "structured_outputs",
)
# Values that `include` may have. Thoughts are always included, as text, and clients may send them
# back. The other values are about tools and images, which no answer of this server contains.
_INCLUDABLE = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Types of items such as web_search_call, custom_tool_call_output and mcp_list_tools.
_OTHER_TOOL = re.compile(r"^mcp_|_call$|_call_output$")
_NAMES = FieldNames(
    params={
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "truncate_prompt_tokens": "truncation",
    },
    form="text.format",
    form_schema="text.format.schema",
    form_strict="text.format.strict",
    tool_schema="parameters",
    tool_strict="strict",
    named_choice='{"type": "function", "name": "..."}',
)
# Types of items that are supported.
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_EFFORTS = ReasoningEffort.__args__
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the response repeats, or that have a meaning only in this API."""

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
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # OpenAI groups its customers' requests by these. They do not affect answers.
    prompt_cache_key: str | None = None
    session_id: str | None = None
    service_tier: str | None = None

    @property
    def effort(self) -> object:
        """How much the model should think; None leaves it to the model."""
        return (self.reasoning or {}).get("effort")


def parse_responses(fields: Mapping[str, object]) -> ResponsesRequest:
    """Converts a JSON object to a request.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or is not supported.
    """
    refuse_unsupported(fields, RESPONSES_FIELDS)
    record_ignored_fields(fields, RESPONSES_IGNORED)
    request = convert_fields(fields, ResponsesRequest)
    _check_values(request)
    if request.background and request.stream:
        raise UnsupportedFeatureError(
            "background and stream together are not supported; send only one of them, and fetch "
            "background responses with GET /v1/responses/{response_id}.",
            param="background",
        )
    if request.background and request.store is False:
        raise InvalidRequestError(
            "a response in the background must be stored, because clients fetch it later; leave "
            "store out.",
            param="background",
        )
    return request


def _check_values(request: ResponsesRequest) -> None:
    """Checks values here, because errors of the chat would name the chat's fields."""
    check_range("max_output_tokens", request.max_output_tokens, low=1, high=MAX_MAX_TOKENS)
    if request.effort not in (None, *_EFFORTS):
        raise InvalidRequestError(
            f"reasoning.effort must be one of {', '.join(_EFFORTS)}, got "
            f"{shorten(request.effort)}.",
            param="reasoning.effort",
        )
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise UnsupportedFeatureError(
                f"include has {shorten(name)}; it may have {', '.join(_INCLUDABLE)}.",
                param="include",
            )


def input_items(request: ResponsesRequest) -> list[dict[str, object]]:
    """The items that a request adds to its conversation.

    Raises:
        InvalidRequestError: There are none.
    """
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input must not be empty.", param="input")
    return request.input


def chat_of_responses(
    fields: Mapping[str, object],
    request: ResponsesRequest,
    earlier_items: Sequence[dict[str, object]] = (),
) -> ChatCompletionRequest:
    """Converts a request to the chat that answers it.

    Args:
        fields: The JSON object of the request.
        earlier_items: The conversation before the request.

    Raises:
        InvalidRequestError: An item or a field is not valid or not supported.
    """
    chat: dict[str, object] = {name: fields[name] for name in _SAME_NAMES if name in fields}
    # Instructions of earlier requests do not apply any more.
    system = [{"role": "system", "content": request.instructions}]
    chat["messages"] = system if request.instructions is not None else []
    # In errors, the request's own items count from 0, and earlier ones are negative.
    items = enumerate([*earlier_items, *input_items(request)], start=-len(earlier_items))
    messages = _messages(items)
    if not messages:
        raise InvalidRequestError(
            "input has no message, only items that are ignored, such as reasoning without a text; "
            "send a message too.",
            param="input",
        )
    chat["messages"] += messages
    chat["max_completion_tokens"] = request.max_output_tokens
    if request.tools is not None:
        chat["tools"] = [
            _chat_tool(k, tool)
            for k, tool in enumerate(request.tools)
            if not _is_ignored_tool(tool)
        ]
    chat["tool_choice"] = _chat_tool_choice(request.tool_choice)
    chat["response_format"] = _response_format(request.text)
    chat["reasoning_effort"] = request.effort
    if request.truncation == "auto":
        chat["truncate_prompt_tokens"] = "auto"
    with _NAMES.in_errors():
        return parse_chat(chat)


def responses_names(request: ResponsesRequest) -> FieldNames:
    """The client's names for the fields of the chat."""
    return _NAMES.with_tools(request.tools, _is_ignored_tool)


def _is_ignored_tool(tool: Mapping[str, object]) -> bool:
    return is_ignored_tool(tool, own_types=("function",), form="parameters")


def _messages(items: Iterable[tuple[int, dict[str, object]]]) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    thoughts: list[str] = []
    for k, item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += _reasoning_texts(f"input[{k}]", item)
            continue
        if _is_ignored(kind):
            record_ignored(f"items of type {kind}")
            continue
        thought, thoughts = "\n".join(thoughts) or None, []
        is_assistants = kind == "message" and item.get("role") == "assistant"
        if thought is not None and not is_assistants and kind != "function_call":
            _add_thought(messages, thought, is_before_output=kind == "function_call_output")
            thought = None
        if kind == "message":
            message = {name: item[name] for name in ("role", "content") if name in item}
            _add_message(messages, _checked_message(f"input[{k}]", message) | _thought(thought))
        elif kind == "function_call":
            _add_call(f"input[{k}]", messages, item, thought)
        elif kind == "function_call_output":
            messages.append(_tool_message(f"input[{k}]", item))
        else:
            raise UnsupportedFeatureError(
                f"input[{k}].type must be one of {', '.join(_ITEM_TYPES)}, got {shorten(kind)}.",
                param=f"input[{k}].type",
            )
    if thoughts:
        _add_thought(messages, "\n".join(thoughts), is_before_output=False)
    return messages


def _checked_message(path: str, message: Mapping[str, object]) -> dict[str, object]:
    return chat_message(path, message, roles=ROLES, text_type="input_text")


def _is_ignored(kind: object) -> bool:
    """Whether an item is about a tool that OpenAI's server runs, or that it defines."""
    is_own = kind in ("function_call", "function_call_output")
    return isinstance(kind, str) and not is_own and _OTHER_TOOL.search(kind) is not None


def _add_thought(
    messages: list[dict[str, object]], thought: str, *, is_before_output: bool
) -> None:
    """Adds a thought that no item of the assistant follows.

    Before the output of a call, it is added to the message with the call, because no message may
    separate them: [call, thought, output] -> [assistant(thought, call), tool]. Otherwise it becomes
    a message without content, because the answer was cut off while the model thought.
    """
    # The outputs of several calls of one message follow each other.
    caller = next((m for m in reversed(messages) if m.get("role") != "tool"), {})
    if is_before_output and caller.get("tool_calls"):
        earlier = caller.get("reasoning")
        caller["reasoning"] = thought if earlier is None else f"{earlier}\n{thought}"
        return
    messages.append({"role": "assistant", "content": "", "reasoning": thought})


def _add_message(messages: list[dict[str, object]], message: dict[str, object]) -> None:
    """Adds a message. Text of the assistant after its call is added to the message with the call,
    because no message may separate it from the output of the call.
    """
    last = messages[-1] if messages else {}
    is_text_after_call = message["role"] == "assistant" and last.get("tool_calls")
    if not is_text_after_call or "reasoning" in message:
        messages.append(message)
        return
    last["content"] = [*_parts(last["content"]), *_parts(message["content"])]


def _parts(content: object) -> list[object]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _add_call(
    path: str, messages: list[dict[str, object]], item: Mapping[str, object], thought: str | None
) -> None:
    """Adds a call to the last message. After thoughts, or another role, it gets a new message."""
    if not isinstance(item.get("name"), str):
        raise InvalidRequestError(
            f"{path}.name must be a string, got {shorten(item.get('name'))}.", param=f"{path}.name"
        )
    _check_call_id(path, item)
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": item.get("arguments")},
    }
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and thought is None:
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
        return
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages.append(message | _thought(thought))


def _tool_message(path: str, item: Mapping[str, object]) -> dict[str, object]:
    _check_call_id(path, item)
    content = tool_content(f"{path}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


def _check_call_id(path: str, item: Mapping[str, object]) -> None:
    call_id = item.get("call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidRequestError(
            f"{path}.call_id must be a string, got {shorten(call_id)}.", param=f"{path}.call_id"
        )


def _reasoning_texts(path: str, item: Mapping[str, object]) -> list[str]:
    """The item's text, or the parts of its summary if it has no text.

    Raises:
        InvalidRequestError: The text or summary is not a list of texts.
        UnsupportedFeatureError: The text is encrypted.
    """
    content, summary = (_part_texts(path, item, name) for name in ("content", "summary"))
    if content:
        return ["".join(content)]
    if item.get("encrypted_content"):
        raise UnsupportedFeatureError(
            f"{path}.encrypted_content cannot be read: this server sends thoughts as text, in "
            "content. Leave out items of another server, or their encrypted_content.",
            param=f"{path}.encrypted_content",
        )
    return summary


def _part_texts(path: str, item: Mapping[str, object], name: str) -> list[str]:
    """The texts in a field that are not empty; none if the item does not have the field."""
    parts = [] if item.get(name) is None else item[name]
    if not isinstance(parts, list):
        raise _parts_error(f"{path}.{name}", name, parts)
    for k, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise _parts_error(f"{path}.{name}[{k}]", name, part)
    return [part["text"] for part in parts if part["text"]]


def _parts_error(where: str, name: str, value: object) -> InvalidRequestError:
    kind = {"content": "reasoning_text", "summary": "summary_text"}[name]
    return InvalidRequestError(
        f'{name} of a reasoning item must be a list of {{"type": "{kind}", "text": "..."}}; '
        f"{where} is {shorten(value)}. Send the item back as it came, or leave it out.",
        param=where,
    )


def _thought(thought: str | None) -> dict[str, str]:
    return {} if thought is None else {"reasoning": thought}


def _chat_tool(k: int, tool: Mapping[str, object]) -> dict[str, object]:
    """{"type": "function", "name": "f", ...} -> {"type": "function", "function": {...}}"""
    if tool.get("type") != "function":
        raise UnsupportedFeatureError(
            f"tools[{k}].type is {shorten(tool.get('type'))}; this server supports only functions.",
            param=f"tools[{k}].type",
        )
    name = tool.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(
            f'tools[{k}] must be {{"type": "function", "name": "...", "parameters": {{...}}}}, its '
            f'name of letters, digits, "_", "-" and ".", got {shorten(tool)}.',
            param=f"tools[{k}]",
        )
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    strict = {} if tool.get("strict") is None else {"strict": tool["strict"]}
    return {"type": "function", "function": function, **strict}


def _chat_tool_choice(choice: str | Mapping[str, object] | None) -> object:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "name": '
            f'"..."}}, got {shorten(choice)}.',
            param="tool_choice",
        )
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(text: Mapping[str, object] | None) -> object:
    """{"format": {"type": "json_schema", "schema": {}}} -> a chat's `response_format`."""
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in _FORMATS:
        raise InvalidRequestError(
            f"text.format.type must be one of {', '.join(_FORMATS)}, got {shorten(kind)}.",
            param="text.format",
        )
    if kind != "json_schema":
        return form
    if not isinstance(form.get("schema"), (Mapping, bool)):
        raise InvalidRequestError(
            'text.format must be {"type": "json_schema", "name": "...", "schema": {...}}, got '
            f"{shorten(form)}.",
            param="text.format",
        )
    named = {"schema": form["schema"], "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": named}
