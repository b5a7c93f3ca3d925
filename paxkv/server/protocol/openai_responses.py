"""Response bodies of /v1/completions; usage and log-probabilities, which chats have too."""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput

# JSON has no -Infinity. OpenAI and vLLM send this for a token that cannot be sampled.
MIN_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Token counts of the prompts.

    Args:
        truncated_tokens: Tokens that `truncate_prompt_tokens` removed. They do not count as tokens
            of the prompts. Left out if no prompt was cut.
    """

    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens of thoughts, including the one that ends them. The answer's tokens include these."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# Keys are token ids as strings, because JSON has no other keys.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A completion or one chunk of it, which have the same form in OpenAI's API."""

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


@dataclasses.dataclass(slots=True)
class UsageCounter:
    """Counts the tokens of one HTTP request: prompts and completions.

    Args:
        num_thought_tokens: Returns the tokens of thoughts; None leaves them out of the usage.
    """

    num_thought_tokens: Callable[[], int] | None = None
    completion_tokens: int = 0
    # Index of a prompt -> its tokens, cached tokens and truncated tokens.
    _prompts: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)

    def set_prompt(self, prompt_idx: int, output: RequestOutput) -> None:
        """Sets the counts of a prompt. If they differ between outputs, the last ones are right."""
        self._prompts[prompt_idx] = (
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            output.num_truncated_tokens,
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(num_tokens for num_tokens, _, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(num_cached for _, num_cached, _ in self._prompts.values())

    @property
    def prompt_details(self) -> PromptTokensDetails:
        num_truncated = sum(num_truncated for _, _, num_truncated in self._prompts.values())
        return PromptTokensDetails(
            cached_tokens=self.cached_tokens, truncated_tokens=num_truncated or UNSET
        )

    def add_tokens(self, output: RequestOutput) -> None:
        self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def usage(self) -> Usage:
        thoughts = self.num_thought_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=self.prompt_details,
            completion_tokens_details=UNSET if thoughts is None else ReasoningTokens(thoughts()),
        )


def choice_index(prompt_idx: int, completion: CompletionOutput, num_choices: int) -> int:
    """With n=3, the first prompt has the choices 0, 1, 2 and the second one 3, 4, 5."""
    return prompt_idx * num_choices + completion.index


def has_new_content(completion: CompletionOutput, *, shows_token_ids: bool) -> bool:
    """Whether an output has anything to send. Incomplete characters and stop strings are not sent.

    Args:
        shows_token_ids: Whether the client wants all token ids, also of tokens without text.
    """
    has_ids = shows_token_ids and bool(completion.token_ids)
    return bool(completion.text or completion.logprobs or completion.finished or has_ids)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[dict[int, Logprob] | None],
    num_top: int,
    *,
    text_offset: int,
    as_token_ids: bool = False,
    decode: Callable[[int], str] | None = None,
) -> CompletionLogprobs:
    """Logprobs in the form of /v1/completions.

    As in vLLM, `top_logprobs` contains the sampled token even if it is not one of the `num_top`
    most likely ones.

    Args:
        positions: Log-probabilities for each token; None for the first token of a prompt.
        text_offset: Characters of this choice's tokens that earlier chunks reported.
        as_token_ids: Show tokens as "token_id:17" instead of as text.
        decode: Returns the text of a token whose position is None.
    """
    formatted = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        if position is None:
            text = "" if decode is None else decode(token_id)
            formatted.tokens.append(f"token_id:{token_id}" if as_token_ids else text)
            formatted.token_logprobs.append(None)
            formatted.top_logprobs.append(None)
        else:
            drawn = position[token_id]
            text = drawn.decoded_token
            shown = {token_id: drawn} | dict(_most_likely(position, num_top))
            formatted.tokens.append(_token(token_id, drawn, as_token_ids))
            formatted.token_logprobs.append(_finite(drawn.logprob))
            tops: dict[str, float] = {}
            for i, p in shown.items():
                # Several tokens may have the same text, for example parts of characters.
                tops.setdefault(_token(i, p, as_token_ids), _finite(p.logprob))
            formatted.top_logprobs.append(tops)
        formatted.text_offset.append(text_offset)
        text_offset += len(text)
    return formatted


def chat_logprobs(
    completion: CompletionOutput,
    num_top: int | None,
    *,
    token_bytes: Callable[[int], bytes],
    as_token_ids: bool = False,
) -> ChatLogprobs | None:
    """Logprobs in the form of /v1/chat/completions.

    Args:
        token_bytes: Returns the bytes of a token, which may be only a part of a character.
        num_top: Number of most likely tokens; None if no log-probabilities were requested.
    """
    if completion.logprobs is None or num_top is None:
        return None
    content = []
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        drawn = position[token_id]
        content.append(
            TokenLogprob(
                token=_token(token_id, drawn, as_token_ids),
                logprob=_finite(drawn.logprob),
                bytes=list(token_bytes(token_id)),
                top_logprobs=[
                    TopLogprob(_token(i, p, as_token_ids), _finite(p.logprob), list(token_bytes(i)))
                    for i, p in _most_likely(position, num_top)
                ],
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[dict[int, Logprob] | None]) -> PromptLogprobs:
    """Logprobs of a prompt in vLLM's form, which is the same for both endpoints."""
    return [
        None
        if position is None
        else {
            str(i): PromptLogprob(_finite(p.logprob), p.rank, p.decoded_token)
            for i, p in position.items()
        }
        for position in positions
    ]


def _most_likely(position: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    # `position` also contains the sampled token, which may not be likely enough.
    return ranked if num_top == -1 else ranked[:num_top]


def _token(token_id: int, logprob: Logprob, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else logprob.decoded_token


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
