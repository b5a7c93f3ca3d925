"""Messages from the engine core to its clients: new tokens, statistics, replies."""

import dataclasses
from typing import Literal

import msgspec

from paxkv.contracts.observation import BlockResidency
from paxkv.contracts.scheduler_output import TokenLogprobs

# "stop": EOS, a stop token or a stop string, or no token may follow. "error": the engine or a
# grammar failed.
FinishReason = Literal["stop", "length", "abort", "error"]
# The stop reason if a request's own settings forbid every next token.
NO_TOKEN_LEFT = (
    "allowed_token_ids, bad_words and min_tokens leave none of the tokens that may come next; "
    "loosen them"
)


# A struct, because the scheduler makes one for every token of every request, and a frozen dataclass
# takes five times as long. The garbage collector may skip it, because it cannot be part of a
# reference cycle. Encoded as an array without trailing defaults, it has a third of the bytes of an
# object with field names.
class EngineCoreOutput(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True, omit_defaults=True
):
    """The result of one step for one request.

    Args:
        new_token_ids: Tokens sampled since the last output; may be empty after an abort.
        num_cached_tokens: Prompt tokens that were already computed at the first admission.
        finish_reason: None while the request is unfinished.
        stop_reason: The id of the stop token, or of a further EOS token, that ended the request.
            None for the first EOS token. A text if no token ended the request: it says why the
            request could not continue.
        prompt_logprobs: One entry per prompt token except the first. Set together with the first
            output token, if the request asked for prompt log-probabilities.
        num_preemptions: Number of preemptions of this request so far.
        pooling_output: The result of a pooled request, set when it ends.
        num_draft_tokens: Drafts that the step verified.
        num_accepted_tokens: How many of them were accepted.
    """

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    pooling_output: list[float] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Durations of a request up to its first token.

    Args:
        queue_s: From its arrival to the first step that schedules it.
        prefill_s: From that step to its first token.
    """

    queue_s: float
    prefill_s: float


# Upper bounds of the histogram of tokens per step; the same as vLLM's.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


# A struct, because every step makes one, and a frozen dataclass of this size takes 25 times longer.
class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine's statistics after one step; counters count since the start.

    Args:
        num_compiling_reqs: Waiting requests whose grammar is being compiled. They do not wait for
            KV memory.
        kv_cache_usage: Share of the blocks that requests hold, in [0, 1].
        prefix_cache_queries: Tokens looked up in the prefix cache at admissions.
        prefix_cache_hits: Tokens found by these look-ups.
        prefix_cache_recent_queries: `prefix_cache_queries` of the most recent requests only.
        prefix_cache_recent_hits: `prefix_cache_hits` of the most recent requests only.
        prefix_cache_preempted_queries: Tokens looked up when preempted requests were admitted
            again. They do not count in the four fields above.
        prefix_cache_preempted_hits: Tokens found by these look-ups.
        kv_block_residency: How long a sample of the blocks lived, was idle and waited for reuse.
        num_allocated_slots: Token positions in held blocks; a shared block counts once.
        num_used_slots: Token positions in held blocks with a computed token. Both numbers are
            counted only every few steps, and are repeated in between.
        num_corrupted_reqs: Requests whose logits contained NaN or infinity, if the engine checks.
        num_replaced_engines: For several engines together: how many engines died and were
            replaced while `engine_start_time` did not change.
        num_drafts: How often drafts were verified: once per request and step that has any.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Drafts that were accepted.
        num_accepted_per_pos: The same for first drafts, second drafts and so on; () without a
            drafter.
        step_token_counts: Number of steps in each bucket of `STEP_TOKEN_BUCKETS` (not cumulative),
            then of steps with more tokens. Each step of a burst counts.
        expert_tokens: Layer -> number of tokens routed to each of its experts, with
            `expert_load_window`. {} means that the counts have not changed since the last message,
            or that nothing is counted. For several engines together, only `engines` have it.
        engine_start_time: Seconds since the epoch. A changed value means that another engine runs,
            whose counters started at 0.
        engines: For several engines together: the statistics of each engine, in order. Counters of
            an engine that replaced a dead one continue from the dead one's, but its start time is
            its own. () for one engine.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_compiling_reqs: int = 0
    kv_cache_usage: float = 0.0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_recent_queries: int = 0
    prefix_cache_recent_hits: int = 0
    prefix_cache_preempted_queries: int = 0
    prefix_cache_preempted_hits: int = 0
    num_allocated_slots: int = 0
    num_used_slots: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    num_compiles_after_ready: int = 0
    num_corrupted_reqs: int = 0
    num_replaced_engines: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: tuple[int, ...] = ()
    kv_block_residency: BlockResidency = BlockResidency()
    step_token_counts: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BUCKETS) + 1)
    expert_tokens: dict[int, tuple[int, ...]] = {}
    engine_start_time: float = 0.0
    engines: tuple["SchedulerStats", ...] = ()

    @property
    def padding_waste_ratio(self) -> float:
        """Share of all computed tokens that were padding, since the start; 0 before the first."""
        num_computed = self.num_scheduled_tokens + self.num_padded_tokens
        return self.num_padded_tokens / num_computed if num_computed else 0.0

    @property
    def kv_waste_ratio(self) -> float:
        """Share of token positions in held blocks that hold no token; 0 if no block is held."""
        if self.num_allocated_slots == 0:
            return 0.0
        return 1.0 - self.num_used_slots / self.num_allocated_slots

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the most recent requests' tokens that were found; 0 before the first request."""
        if self.prefix_cache_recent_queries == 0:
            return 0.0
        return self.prefix_cache_recent_hits / self.prefix_cache_recent_queries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All outputs of one step, for one client.

    Args:
        timestamp: Seconds since the epoch.
        monotonic_s: Seconds of the monotonic clock of the engine's machine.
        request_times: By request id, for requests that got their first token in this step.
        engine_idx: Index of the engine that computed the step, if there are several.
    """

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float
    monotonic_s: float
    request_times: dict[str, RequestTimes] = dataclasses.field(default_factory=dict)
    engine_idx: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityReply:
    """Answer to a `UtilityCall`; exactly one of `result_json` and `error` is set."""

    call_id: int
    result_json: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineDead:
    """The last message of an engine: why it ended.

    Args:
        retry_after_s: Estimated seconds until the engine that replaces it is ready; None if it is
            not replaced.
        request_ids: Requests that ended with this engine, if other engines continue. None means
            all requests.
    """

    reason: str
    retry_after_s: int | None = None
    request_ids: tuple[str, ...] | None = None


# Messages that an engine may send; `contracts/wire.py` encodes them.
EngineOutput = StepOutputs | UtilityReply | EngineDead
