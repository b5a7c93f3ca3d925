"""Bodies that /v1/completions and /v1/chat/completions answer with, whole and in chunks."""

import dataclasses
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput

# JSON has no -Infinity; OpenAI and vLLM send this for a token that cannot be drawn.
MIN_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists that run in parallel, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or one chunk of it: OpenAI gives both the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """An answer (`chat.completion`) or one chunk of it (`chat.completion.chunk`)."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None | UnsetType = UNSET


@dataclasses.dataclass(slots=True)
class UsageCounter:
    """Tokens of the prompts of one HTTP request; deltas add up as they pass."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add_prompt(self, output: RequestOutput) -> None:
        """Call once per prompt, on its last output."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens

    def add_tokens(self, output: RequestOutput) -> None:
        self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


def choice_index(prompt_idx: int, completion: CompletionOutput, num_choices: int) -> int:
    """Two prompts with n=3 -> choices 0, 1, 2 of the first and 3, 4, 5 of the second."""
    return prompt_idx * num_choices + completion.index


def has_news(completion: CompletionOutput) -> bool:
    """False for half a character, or the start of what may be a stop string."""
    return bool(completion.text or completion.logprobs or completion.finished)


def completion_logprobs(
    completion: CompletionOutput, num_top: int | None, text_offset: int
) -> CompletionLogprobs | None:
    """Logprobs in the form of /v1/completions.

    As in vLLM, the drawn token is among the `top_logprobs` of its position even when it is not one
    of the `num_top` most likely.

    Args:
        num_top: None when they were not asked for; a beam search has them all the same.
        text_offset: Characters of this choice's tokens that earlier chunks reported.
    """
    if completion.logprobs is None or num_top is None:
        return None
    formatted = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        drawn = position[token_id]
        formatted.tokens.append(drawn.decoded_token)
        formatted.token_logprobs.append(_finite(drawn.logprob))
        formatted.top_logprobs.append(
            {drawn.decoded_token: _finite(drawn.logprob)}
            | {p.decoded_token: _finite(p.logprob) for p in _most_likely(position, num_top)}
        )
        formatted.text_offset.append(text_offset)
        text_offset += len(drawn.decoded_token)
    return formatted


def chat_logprobs(completion: CompletionOutput, num_top: int | None) -> ChatLogprobs | None:
    """Logprobs in the form of /v1/chat/completions; `num_top` as in `completion_logprobs`."""
    if completion.logprobs is None or num_top is None:
        return None
    content = []
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        drawn = position[token_id]
        content.append(
            TokenLogprob(
                token=drawn.decoded_token,
                logprob=_finite(drawn.logprob),
                bytes=_utf8(drawn.decoded_token),
                top_logprobs=[
                    TopLogprob(p.decoded_token, _finite(p.logprob), _utf8(p.decoded_token))
                    for p in _most_likely(position, num_top)
                ],
            )
        )
    return ChatLogprobs(content)


def _most_likely(position: dict[int, Logprob], num_top: int) -> Sequence[Logprob]:
    # The drawn token is in `position` too, and counts only when it is likely enough.
    return sorted(position.values(), key=lambda logprob: logprob.rank)[:num_top]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _utf8(token: str) -> list[int]:
    return list(token.encode("utf-8", errors="replace"))
