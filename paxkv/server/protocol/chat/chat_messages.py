"""Checks the messages of a chat, and converts them for chat templates."""

import functools
from collections.abc import Mapping, Sequence

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.chat.thought_parts import THOUGHT_TYPES, thought_text
from paxkv.server.protocol.json_body import decode_json
from paxkv.server.protocol.openai_protocol import shorten
from paxkv.server.protocol.unsupported_fields import MESSAGE_FIELDS, refuse_unsupported
from paxkv.text.call_arguments import check_depth, dump_json, template_arguments

MAX_CONTENT_PARTS = 10_000
# OpenAI's older name for the role "tool".
_OLD_TOOL_ROLE = "function"
ROLES = ("system", "developer", "user", "assistant", "tool")
# Type of a part -> the field with its text. "input_text" and "output_text" are names in OpenAI's
# other endpoints. Clients send an assistant's refusal back as they received it.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Types of parts that are not text. In the result of a tool, objects of any other type are data.
_MEDIA_TYPES = frozenset(
    ("audio", "document", "file", "image", "input_audio", "input_file", "input_image", "video")
    + ("audio_url", "file_url", "image_url", "video_url")
)
# Fields with the thoughts of an earlier answer. Templates read one or the other.
_REASONING_FIELDS = ("reasoning", "reasoning_content")


def chat_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Converts messages for a chat template.

    Contents become strings or lists of text parts. Arguments of tool calls become objects, or a
    `CallText` if they are not an object. OpenAI's older role "function" and field `function_call`
    become the role "tool" and tool calls.

    Raises:
        InvalidRequestError: There is no message, or one has a role or content that is not valid.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    checked = []
    # The id that the last `function_call` is given, because it has none itself.
    call_id: str | None = None
    for i, message in enumerate(messages):
        if isinstance(message.get("function_call"), Mapping):
            # Mistral's templates accept only ids of nine characters.
            call_id = f"call{i:05d}"
            message = _with_tool_call(f"messages[{i}]", message, call_id)
        elif message.get("role") == _OLD_TOOL_ROLE:
            message = {**message, "role": "tool", "tool_call_id": call_id}
        checked.append(chat_message(f"messages[{i}]", message))
    return checked


def content_text(content: object) -> str:
    """The text of an assistant's content, with one line per part, without thoughts.

    Raises:
        InvalidRequestError: The content is neither a string nor a list of text parts.
    """
    parts, _ = _content_and_thought("content", content, role="assistant")
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def chat_message(
    path: str,
    message: Mapping[str, object],
    *,
    roles: Sequence[str] = (*ROLES, _OLD_TOOL_ROLE),
    text_type: str = "text",
) -> dict[str, object]:
    """Converts one message for a chat template.

    Args:
        path: The message's name in errors.
        roles: The roles that errors list.
        text_type: The type of text parts in errors.

    Raises:
        InvalidRequestError: The role or content is not valid.
    """
    refuse_unsupported(message, MESSAGE_FIELDS, path=f"{path}.")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(roles)}, got {shorten(role)}.",
            param=f"{path}.role",
        )
    checked: dict[str, object] = {"role": role}
    tool_calls = message.get("tool_calls")
    if tool_calls and role != "assistant":
        raise _no_calls_error(path, "tool_calls", role)
    name, content = "content", message.get("content")
    # OpenAI's answers put the text of a refusal into this field.
    if content is None and role == "assistant" and message.get("refusal") is not None:
        name, content = "refusal", message["refusal"]
    # Null is an empty text, as in vLLM. Without the field, a user's message is a mistake.
    if content is None and "content" not in message and role not in ("assistant", "tool"):
        raise _content_error(f"{path}.content", content)
    checked["content"], thought = _content_and_thought(
        f"{path}.{name}", content, role=role, text_type=text_type
    )
    if tool_calls:
        checked["tool_calls"] = _tool_calls(f"{path}.tool_calls", tool_calls)
    for name in ("name", "tool_call_id") if role == "tool" else ("name",):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(
                f"{path}.{name} must be a string, got {shorten(value)}.", param=f"{path}.{name}"
            )
        if value is not None:
            checked[name] = value
    if role == "assistant":
        fields = [thought_text(f"{path}.{name}", message.get(name)) for name in _REASONING_FIELDS]
        # Some clients send the same thoughts in a field and in the content.
        thought = next(filter(None, fields), thought)
        checked |= dict.fromkeys(_REASONING_FIELDS, thought) if thought else {}
    return checked


def tool_content(path: str, content: object) -> str | list[dict[str, str]]:
    """Converts the result of a tool to the content of a message. Data becomes JSON text.

    Raises:
        InvalidRequestError: The result has parts that are not text.
    """
    return _content_and_thought(path, content, role="tool")[0]


def _content_and_thought(
    path: str, content: object, *, role: str, text_type: str = "text"
) -> tuple[str | list[dict[str, str]], str]:
    """Separates a content, a string or parts {"type": "text", "text": "..."}, from thoughts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if _is_data(content, role=role):
        check_depth(path, content)
        return dump_json(content), ""
    # Some clients send a single part instead of a list.
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list):
        raise _content_error(path, content)
    if len(parts) > MAX_CONTENT_PARTS:
        raise InvalidRequestError(
            f"{path} has {len(parts)} parts; at most {MAX_CONTENT_PARTS} fit in one message.",
            param=path,
        )
    texts, thoughts = [], []
    for k, part in enumerate(parts):
        if role == "assistant" and isinstance(part, Mapping) and part.get("type") in THOUGHT_TYPES:
            thoughts.append(thought_text(f"{path}[{k}]", part))
        else:
            texts.append({"type": "text", "text": _part_text(f"{path}[{k}]", part, text_type)})
    return texts, "".join(thoughts)


def _is_data(content: object, *, role: str) -> bool:
    """Whether a content is data, which is shown as JSON, and not text parts.

    {"id": 5} is data in every role. In the result of a tool, 5, [{"id": 5}] and {"type": "dir"} are
    data too.
    """
    if role != "tool":
        return isinstance(content, Mapping) and "type" not in content
    if isinstance(content, list):
        return not all(map(_is_part, content))
    return not _is_part(content)


def _is_part(value: object) -> bool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(value, str) or (
        isinstance(kind, str) and (kind in _TEXT_FIELDS or kind in _MEDIA_TYPES)
    )


def _part_text(path: str, part: object, text_type: str) -> str:
    # As in vLLM, a bare string counts as a part.
    text = part
    if isinstance(part, Mapping):
        kind = part.get("type")
        field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
        text = None if field is None else part.get(field)
    if not isinstance(text, str):
        raise InvalidRequestError(
            f'{path} must be {{"type": "{text_type}", "text": "..."}}, got {shorten(part)}; '
            "this server reads text only.",
            param=path,
        )
    return text


def _content_error(path: str, content: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path} must be a string or a list of text parts, got {shorten(content)}.", param=path
    )


def _no_calls_error(path: str, name: str, role: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path}.{name} is in a message of role {shorten(role)}; only messages of role "
        "'assistant' have calls.",
        param=f"{path}.{name}",
    )


def _with_tool_call(path: str, message: Mapping[str, object], call_id: str) -> dict[str, object]:
    """A message with its `function_call` as its only tool call."""
    function, role = message["function_call"], message.get("role")
    if role != "assistant":
        raise _no_calls_error(path, "function_call", role)
    if message.get("tool_calls"):
        raise InvalidRequestError(
            f"{path} has function_call and tool_calls; send only tool_calls.",
            param=f"{path}.function_call",
        )
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f'{path}.function_call must be {{"name": "...", "arguments": "..."}}, got '
            f"{shorten(function)}.",
            param=f"{path}.function_call",
        )
    return {**message, "tool_calls": [{"id": call_id, "function": function}]}


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
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidRequestError(f"{path}.id must be a string.", param=f"{path}.id")
    # A malformed call in an earlier answer must not end the conversation.
    decode = functools.partial(decode_json, clips_numbers=False)
    arguments = template_arguments(function.get("arguments"), decode=decode)
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    } | ({} if call_id is None else {"id": call_id})
