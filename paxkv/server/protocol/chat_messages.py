"""The messages of a chat, checked, as a chat template takes them."""

from collections.abc import Mapping

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.json_body import decode_json
from paxkv.server.protocol.openai_protocol import shorten
from paxkv.server.protocol.unsupported_fields import MESSAGE_FIELDS, refuse_unsupported

MAX_CONTENT_PARTS = 10_000
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Type of a part -> the field with its text. Besides "text", what OpenAI's other endpoints call the
# same, and an assistant's refusal, which clients send back as they got it.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# What an assistant thought in an earlier turn; templates know it by either name.
_REASONING_FIELDS = ("reasoning", "reasoning_content")


def chat_messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Messages as a chat template takes them.

    Contents are strings, or lists of text parts; arguments of tool calls are objects.

    Raises:
        InvalidRequestError: There is no message, or one has a role or content that cannot be used.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    return [chat_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def content_text(content: object) -> str:
    """The text of a message's content, its parts on lines of their own.

    Raises:
        InvalidRequestError: It is neither a string nor a list of text parts.
    """
    parts = _content("content", content)
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def chat_message(path: str, message: Mapping[str, object]) -> dict[str, object]:
    """One message as a chat template takes it.

    Args:
        path: What errors call it.

    Raises:
        InvalidRequestError: Its role or content cannot be used.
    """
    refuse_unsupported(message, MESSAGE_FIELDS, path=f"{path}.")
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {shorten(role)}.",
            param=f"{path}.role",
        )
    checked: dict[str, object] = {"role": role}
    tool_calls = message.get("tool_calls")
    if tool_calls and role != "assistant":
        raise InvalidRequestError(
            f"{path}.tool_calls stands in a message of role {role}; only the assistant calls "
            "tools.",
            param=f"{path}.tool_calls",
        )
    content = message.get("content")
    # An assistant need not have said anything: templates get an empty text, as vLLM's do.
    if content is None and role == "assistant":
        content = ""
    checked["content"] = _content(f"{path}.content", content)
    if tool_calls:
        checked["tool_calls"] = _tool_calls(f"{path}.tool_calls", tool_calls)
    names = ("name", "tool_call_id") if role == "tool" else ("name",)
    for name in (*names, *(_REASONING_FIELDS if role == "assistant" else ())):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(
                f"{path}.{name} must be a string, got {shorten(value)}.", param=f"{path}.{name}"
            )
        if value is not None:
            checked[name] = value
    thought = checked.get("reasoning") or checked.get("reasoning_content")
    return checked | (dict.fromkeys(_REASONING_FIELDS, thought) if thought else {})


def _content(path: str, content: object) -> str | list[dict[str, str]]:
    """A string as it is; parts of text as {"type": "text", "text": "..."}."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of text parts, got {shorten(content)}.",
            param=path,
        )
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidRequestError(
            f"{path} has {len(content)} parts; at most {MAX_CONTENT_PARTS} fit in one message.",
            param=path,
        )
    texts = []
    for k, part in enumerate(content):
        # As in vLLM, a bare string counts as a part.
        text = part
        if isinstance(part, Mapping):
            kind = part.get("type")
            field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
            text = None if field is None else part.get(field)
        if not isinstance(text, str):
            raise InvalidRequestError(
                f'{path}[{k}] must be {{"type": "text", "text": "..."}}, got {shorten(part)}; '
                "this server reads text only.",
                param=f"{path}[{k}]",
            )
        texts.append({"type": "text", "text": text})
    return texts


def _tool_calls(path: str, tool_calls: object) -> list[dict[str, object]]:
    if not isinstance(tool_calls, list):
        raise InvalidRequestError(f"{path} must be a list, got {shorten(tool_calls)}.", param=path)
    return [_tool_call(f"{path}[{k}]", call) for k, call in enumerate(tool_calls)]


def _tool_call(path: str, call: object) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f'{path} must be {{"id": "...", "type": "function", "function": {{"name": "...", '
            f'"arguments": "..."}}}}, got {shorten(call)}.',
            param=path,
        )
    arguments = function.get("arguments")
    # Templates write the object; clients send its JSON, or nothing for no arguments.
    if isinstance(arguments, str) and arguments:
        try:
            arguments = decode_json(arguments.encode())
        except (InvalidRequestError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                f"{path}.function.arguments cannot be read: {error}",
                param=f"{path}.function.arguments",
            ) from None
    arguments = arguments or {}
    if not isinstance(arguments, dict):
        raise InvalidRequestError(
            f"{path}.function.arguments must be a JSON object, got {shorten(arguments)}.",
            param=f"{path}.function.arguments",
        )
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidRequestError(f"{path}.id must be a string.", param=f"{path}.id")
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    } | ({} if call_id is None else {"id": call_id})
