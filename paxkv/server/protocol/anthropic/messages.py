"""Converts messages and content blocks of Anthropic's API to the messages of a chat."""

from collections.abc import Mapping, Sequence

import msgspec

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.chat.chat_messages import MAX_CONTENT_PARTS, tool_content
from paxkv.server.protocol.ignored_parts import record_ignored
from paxkv.server.protocol.openai_protocol import shorten

# Types of blocks by the role whose messages may contain them.
_BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
# Blocks of tools that Anthropic's server runs, and references to tools that it looks up. Their
# types of results, such as web_search_tool_result, end with `_SERVER_RESULT`.
_IGNORED_TYPES = frozenset(
    ("server_tool_use", "mcp_tool_use", "container_upload", "tool_reference")
)
_SERVER_RESULT = "_tool_result"
# Claude Code begins its system prompt with a block that differs in every request, so that no
# prefix would be found in the cache. It is not meant for the model.
_BILLING_HEADER = "x-anthropic-billing-header"


def chat_messages_of(
    messages: Sequence[Mapping[str, object]], system: str | Sequence[object] | None
) -> list[dict[str, object]]:
    """The messages of the chat: the system prompt, then every message.

    A user message with tool results becomes one message of the role "tool" per result, and one
    message with the rest.

    Raises:
        InvalidRequestError: A message or block is not valid.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.")
    chat: list[dict[str, object]] = []
    if system is not None:
        text = "".join(_system_texts("system", system))
        chat += [{"role": "system", "content": text}] if text else []
    for i, message in enumerate(messages):
        chat += _chat_messages(f"messages[{i}]", message)
    return chat


def _chat_messages(path: str, message: Mapping[str, object]) -> list[dict[str, object]]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _BLOCK_TYPES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(_BLOCK_TYPES)}, got {shorten(role)}."
        )
    if role == "system":
        text = "".join(_system_texts(f"{path}.content", content))
        return [{"role": "system", "content": text}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _checked_blocks(f"{path}.content", content, _BLOCK_TYPES[role])
    texts = [_string(where, block, "text") for where, block in blocks if block["type"] == "text"]
    chat = {"role": role, "content": _chat_content([text for text in texts if text])}
    if role == "assistant":
        return [chat | _calls_and_thoughts(blocks)]
    results = [_tool_message(where, b) for where, b in blocks if b["type"] == "tool_result"]
    return [*results, chat] if chat["content"] or not results else results


def _calls_and_thoughts(blocks: list[tuple[str, Mapping[str, object]]]) -> dict[str, object]:
    """The tool calls and thoughts in blocks, without thoughts that Anthropic encrypted."""
    found: dict[str, object] = {}
    calls = [_tool_call(where, block) for where, block in blocks if block["type"] == "tool_use"]
    thoughts = [_string(where, b, "thinking") for where, b in blocks if b["type"] == "thinking"]
    if calls:
        found["tool_calls"] = calls
    if any(thoughts):
        found["reasoning"] = "".join(thoughts)
    return found


def _tool_call(path: str, block: Mapping[str, object]) -> dict[str, object]:
    function = {"name": _string(path, block, "name"), "arguments": _arguments(block.get("input"))}
    return {"id": _string(path, block, "id"), "type": "function", "function": function}


def _arguments(value: object) -> object:
    """Converts the input of a call, which is an object unless the model wrote another value.

    Some clients send the JSON text that they received in a stream, as a string.
    """
    if value is None or isinstance(value, (str, Mapping)):
        return value
    return msgspec.json.encode(value).decode()


def _tool_message(path: str, block: Mapping[str, object]) -> dict[str, object]:
    call_id, content = _string(path, block, "tool_use_id"), block.get("content")
    if _is_data(content):
        content = tool_content(f"{path}.content", content)
    if not isinstance(content, str):
        blocks = _checked_blocks(f"{path}.content", content, ("text",))
        content = "\n".join(_string(where, inner, "text") for where, inner in blocks)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _is_data(content: object) -> bool:
    """Whether the result of a tool is data, which is shown as JSON, and not a list of blocks.

    A list consists of blocks if any of its members has a type.
    """
    if not isinstance(content, list):
        return not isinstance(content, str)
    return bool(content) and not any(
        isinstance(block, Mapping) and "type" in block for block in content
    )


def _system_texts(path: str, content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    blocks = _checked_blocks(path, content, ("text",))
    texts = [_string(where, block, "text") for where, block in blocks]
    return [text for text in texts if not text.startswith(_BILLING_HEADER)]


def _checked_blocks(
    path: str, content: object, types: Sequence[str]
) -> list[tuple[str, Mapping[str, object]]]:
    """The blocks of a content that are not ignored, each with its name in errors."""
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of content blocks, got {shorten(content)}."
        )
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidRequestError(
            f"{path} has {len(content)} blocks; at most {MAX_CONTENT_PARTS} fit in one message."
        )
    blocks = [(f"{path}[{k}]", block) for k, block in enumerate(content) if not _is_ignored(block)]
    for where, block in blocks:
        if not isinstance(block, Mapping):
            raise InvalidRequestError(f"{where} must be a content block, got {shorten(block)}.")
        if block.get("type") not in types:
            raise UnsupportedFeatureError(
                f"{where}.type must be one of {', '.join(types)} here, got "
                f"{shorten(block.get('type'))}; this server reads text only."
            )
    return blocks


def _is_ignored(block: object) -> bool:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        return False
    is_ignored = kind in _IGNORED_TYPES or kind.endswith(_SERVER_RESULT)
    if is_ignored:
        record_ignored(f"blocks of type {kind}")
    return is_ignored


def _string(path: str, block: Mapping[str, object], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}.{name} must be a string, got {shorten(value)}.")
    return value


def _chat_content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
