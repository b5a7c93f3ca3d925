"""What a client returns to its caller: outputs of requests, with vLLM's field names, and totals."""

import dataclasses
from collections.abc import Sequence

from paxkv.contracts.engine_output import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position; `rank` is 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTimes:
    """Where the time of a completion went, in seconds.

    Args:
        queue_s: From its arrival in the engine to its first step.
        prefill_s: From there to its first token.
        decode_s: From there to its last one.
        first_token_s: From its arrival at the client to its first token.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: Its place among the completions of its prompt, in `[0, n)`.
        text: The completion so far, or the new part of it when streaming deltas.
        logprobs: Per token, `token id -> Logprob` of the drawn token and the most likely ones;
            None unless asked for.
        stop_reason: The stop string, or the id of the stop token, that ended it; None for the
            tokenizer's EOS. Further ones of the model count as stop tokens. Where its settings left
            no token, a sentence that says so.
        times: Of a finished one that had a token.
        num_preemptions: How often the scheduler preempted it so far.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    times: CompletionTimes | None = dataclasses.field(default=None, compare=False)
    num_preemptions: int = dataclasses.field(default=0, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's prompt and completions.

    Args:
        prompt: The prompt as text, or None when it came as token ids.
        outputs: By index. A stream has only those that have something new.
        finished: Whether all its completions have ended.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        num_truncated_tokens: Prompt tokens that `truncate_prompt_tokens` removed.
        prompt_logprobs: Per token of the prompt, `token id -> Logprob` of that token and of the
            most likely ones; None for the first, which follows nothing. None unless asked for; a
            stream of deltas has them once, with the first tokens.
        ignored_schema_keywords: Places of keywords that no grammar can enforce, in the JSON schemas
            of its structured output: "#/properties/a/uniqueItems".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_truncated_tokens: int = 0
    ignored_schema_keywords: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence that a beam search found.

    Args:
        tokens: Prompt and new tokens, with the EOS token that ended it.
        logprobs: Per new token, the candidates that it was chosen from.
        cum_logprob: Sum of the new tokens' log-probabilities.
        text: Of all `tokens`; the EOS token is left out unless `include_stop_str_in_output`.
        finish_reason: "stop" after EOS, "length" at `max_tokens`.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """One prompt's sequences, best first, at most `beam_width`."""

    sequences: list[BeamSearchSequence]


# Upper bounds of the buckets of waits for a token; those of vLLM.
TOKEN_BUCKETS_S = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Of all requests since the client began, whatever became of them and of their engines.

    Args:
        num_prompt_tokens: Of prompts whose first token has come; n completions, and the steps of a
            beam search, count theirs once.
        num_cached_prompt_tokens: Those of them that came from the prefix cache.
        num_recomputed_prompt_tokens: Last tokens of prompts of which all others came from there:
            one token at least is computed.
        num_generation_tokens: Tokens drawn.
        token_latency_counts: Tokens that were not a completion's first, by how long after the one
            before them they came: in each bucket alone of `TOKEN_BUCKETS_S`, and later.
        token_latency_sum_s: What they took together.
        engines: Where several engines count as one: those of each, in their order.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_recomputed_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    token_latency_counts: tuple[int, ...] = (0,) * (len(TOKEN_BUCKETS_S) + 1)
    token_latency_sum_s: float = 0.0
    engines: tuple["TokenTotals", ...] = ()

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_prompt_tokens
