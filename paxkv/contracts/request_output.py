"""Results that a client returns to its caller: outputs of requests (vLLM's names) and totals."""

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
    """Durations of the phases of a completion, in seconds.

    Args:
        queue_s: From its arrival in the engine to its first step.
        prefill_s: From its first step to its first token.
        decode_s: From its first token to its last token.
        first_token_s: From its arrival at the client to its first token.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStateStats:
    """The figures of a finished request, or of a finished completion, under vLLM's names.

    The fields that end in `_ts` are seconds on the engine's monotonic clock. Only their differences
    have a meaning.

    Args:
        num_generation_tokens: Tokens of the completions.
        arrival_time: Of the request at the client, in seconds since the epoch.
        queued_ts: When the request arrived in the engine.
        scheduled_ts: Start of the first step that computed a part of the prompt.
        first_token_latency: Seconds from the arrival at the client to the first token.
        num_draft_tokens: Drafts that steps verified. vLLM has no such field.
        num_accepted_tokens: How many drafts were accepted. vLLM has no such field.

    Source: `RequestStateStats` in vLLM 0.16's `v1/metrics/stats.py`.
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        index: Index among the completions of the prompt, in `[0, n)`.
        text: The completion so far, or its new part in a stream of deltas.
        logprobs: Per token, `token id -> Logprob` of the sampled token and the most likely tokens;
            None if not requested.
        stop_reason: The stop string, or the id of the stop token, that ended the completion; None
            for the tokenizer's EOS token. Further EOS tokens of the model count as stop tokens. If
            the request's settings allowed no next token, a sentence that says so.
        times: Set if the completion is finished and has a token.
        metrics: Set where `times` is set. `RequestOutput.metrics` joins them for all completions.
        num_preemptions: How often the scheduler has preempted the completion so far.
        num_draft_tokens: Drafts of the completion that steps have verified so far.
        num_accepted_tokens: How many of them were accepted.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    times: CompletionTimes | None = dataclasses.field(default=None, compare=False)
    metrics: RequestStateStats | None = dataclasses.field(default=None, compare=False)
    num_preemptions: int = dataclasses.field(default=0, compare=False)
    num_draft_tokens: int = dataclasses.field(default=0, compare=False)
    num_accepted_tokens: int = dataclasses.field(default=0, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's prompt and completions.

    Args:
        prompt: The prompt as text; None if the caller passed token ids.
        outputs: Completions by index. In a stream, only completions with something new.
        finished: Whether all completions have ended.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        num_truncated_tokens: Prompt tokens that `truncate_prompt_tokens` removed.
        prompt_logprobs: Per prompt token, `token id -> Logprob` of that token and of the most
            likely tokens; None for the first token, which has no predecessor. The whole list is
            None if not requested. In a stream of deltas, it is set once, with the first tokens.
        ignored_schema_keywords: Places of keywords in the request's JSON schemas that the grammar
            does not enforce, such as "#/properties/a/uniqueItems".
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

    @property
    def metrics(self) -> RequestStateStats | None:
        """The figures of the finished completions in `outputs`; None if there is none.

        Of several completions, counts are added, `last_token_ts` is the latest, and the other times
        are the earliest.
        """
        found = [output.metrics for output in self.outputs if output.metrics is not None]
        return _join_metrics(found) if found else None


def _join_metrics(parts: Sequence[RequestStateStats]) -> RequestStateStats:
    def values(name: str) -> list[float]:
        return [getattr(part, name) for part in parts]

    counts = ("num_generation_tokens", "num_draft_tokens", "num_accepted_tokens")
    starts = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "first_token_latency")
    return RequestStateStats(
        last_token_ts=max(values("last_token_ts")),
        **{name: sum(values(name)) for name in counts},
        **{name: min(values(name)) for name in starts},
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence that a beam search found.

    Args:
        tokens: Prompt and new tokens, including the EOS token that ended the sequence.
        logprobs: Per new token, the candidates from which it was chosen.
        cum_logprob: Sum of the new tokens' log-probabilities.
        text: Text of all `tokens`, without the EOS token unless `include_stop_str_in_output`.
        finish_reason: "stop" after EOS, "length" at `max_tokens`.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """At most `beam_width` sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


# Upper bounds of the buckets for the time between two tokens of a completion, as in vLLM.
TOKEN_BUCKETS_S = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Token counts since the client started, including failed requests and replaced engines.

    Args:
        num_prompt_tokens: Tokens of prompts whose first output token has arrived. The prompt of n
            completions, or of the steps of a beam search, counts once.
        num_cached_prompt_tokens: Prompt tokens that came from the prefix cache.
        num_recomputed_prompt_tokens: Last tokens of prompts whose other tokens were all cached. The
            last token of a prompt is always computed.
        num_generation_tokens: Sampled tokens.
        token_latency_counts: Number of tokens per bucket (not cumulative), by the time since the
            previous token of the completion. The last count is of tokens above all bounds in
            `TOKEN_BUCKETS_S`. First tokens of completions do not count.
        token_latency_sum_s: Sum of these times.
        engines: For several engines together: the totals of each engine, in order.
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
