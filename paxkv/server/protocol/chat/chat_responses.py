"""Response bodies of /v1/chat/completions and their chunks."""

import msgspec
from msgspec import UNSET, UnsetType

from paxkv.server.protocol.openai_responses import ChatLogprobs, PromptLogprobs, Usage


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name and its arguments as JSON text; in a chunk, parts of them."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call. In chunks it has an index, and only the first chunk has an id."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. `reasoning_content` repeats `reasoning`, because many clients read this name."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """An answer (`chat.completion`) or one chunk of it (`chat.completion.chunk`)."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
