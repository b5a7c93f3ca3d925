"""Response bodies and events of /v1/responses."""

import msgspec
from msgspec import UNSET, UnsetType

from paxkv.server.protocol.openai_responses import PromptTokensDetails, ReasoningTokens

# An alias, because in structs with a field called `object` the name means that field.
_JsonObject = dict[str, object]


class OutputPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A piece of an item's content."""

    text: str


class TextPart(OutputPart, frozen=True, kw_only=True, tag="output_text"):
    annotations: list[object] = []
    logprobs: list[object] = []


class ThoughtPart(OutputPart, frozen=True, kw_only=True, tag="reasoning_text"):
    pass


class OutputItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One item of a response, such as a message or a call."""

    id: str
    status: str


class MessageItem(OutputItem, frozen=True, kw_only=True, tag="message"):
    role: str = "assistant"
    content: list[TextPart]


class ReasoningItem(OutputItem, frozen=True, kw_only=True, tag="reasoning"):
    summary: list[object] = []
    content: list[ThoughtPart]


class FunctionCallItem(OutputItem, frozen=True, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response in the background failed."""

    code: str
    message: str


class DeletedResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Confirms that a stored response was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response. When its stream begins, it has no output yet."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: _JsonObject
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: _JsonObject
    store: bool = False
    temperature: float
    text: _JsonObject
    tool_choice: str | _JsonObject
    tools: list[_JsonObject]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; its type decides which fields it has."""

    type: str
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[object] | UnsetType = UNSET
