"""Bodies, stream events and errors of Anthropic's API (`/v1/messages`)."""

import msgspec
from msgspec import UNSET, UnsetType

# Anthropic signs thoughts, and checks the signature when clients send them back. paxkv does
# neither, but clients drop thoughts without a signature.
UNSIGNED = "unsigned"


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One block of an answer."""


class ThinkingBlock(ContentBlock, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str


class TextBlock(ContentBlock, frozen=True, kw_only=True, tag="text"):
    text: str


class ToolUseBlock(ContentBlock, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    # An object, unless the model wrote another JSON value.
    input: object


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Tokens of thoughts; `output_tokens` contains them."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or its beginning in the event `message_start`."""

    id: str
    type: str = "message"
    role: str = "assistant"
    content: list[ContentBlock]
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCountBody(msgspec.Struct, frozen=True):
    """The response body of `/v1/messages/count_tokens`."""

    input_tokens: int


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """New text of a block."""


class ThinkingDelta(BlockDelta, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(BlockDelta, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class TextDelta(BlockDelta, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class InputJsonDelta(BlockDelta, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an error."""

    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; its type decides which fields it has."""

    type: str
    message: MessageBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: BlockDelta | MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: AnthropicErrorDetail | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
