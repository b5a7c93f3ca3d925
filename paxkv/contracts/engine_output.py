"""Messages from the engine core to its clients: new tokens, statistics, replies."""

import dataclasses
from typing import Literal

import msgspec

from paxkv.contracts.observation import BlockResidency
from paxkv.contracts.scheduler_output import TokenLogprobs

# "stop" is EOS, a stop token or a stop string, or that nothing may follow; "error" is the engine's
# own failure, or a grammar's.
FinishReason = Literal["stop", "length", "abort", "error"]
# Stop reason where a request's own settings rule out every token that might come next.
NO_TOKEN_LEFT = (
    "allowed_token_ids, bad_words and min_tokens leave none of the tokens that may come next; "
    "loosen them"
)


# Not a dataclass: one is made for every token of every request, and a frozen dataclass takes five
# times as long. It holds no other object that could lead back to it, so the collector may skip it.
# As bytes it is an array up to its last field that says something: a third of those with names.
class EngineCoreOutput(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True, omit_defaults=True
):
    """What one step made for one request.

    Args:
        new_token_ids: Tokens drawn since the last output; may be empty at an abort.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        finish_reason: None while the request goes on.
        stop_reason: The id of the stop token, or of a further EOS of the model, that ended it; None
            for its first EOS. Text says why the engine itself could not go on; no token ended it.
        prompt_logprobs: With the first token of a request that asked for them: an entry for each
            token of the prompt but the first.
        num_preemptions: Of this request so far.
        pooling_output: The result of a pooled request, with its end.
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


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request waited for until its first token.

    Args:
        queue_s: Until the first step that it was part of.
        prefill_s: From there to its first token.
    """

    queue_s: float
    prefill_s: float


# Upper bounds of the buckets in which steps are counted by their tokens; those of vLLM.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


# No dataclass either: every step makes one, of so many fields that it would take 25 times as long.
class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after one step; counters run since the start.

    Args:
        num_compiling_reqs: Those of the waiting ones whose grammar is being compiled: they wait
            for no room.
        kv_cache_usage: Share of blocks in use, in [0, 1].
        prefix_cache_queries: Prompt tokens looked up in the prefix cache.
        prefix_cache_hits: Those found there.
        prefix_cache_recent_queries: The same of the most recent requests alone.
        prefix_cache_recent_hits: Those found there.
        prefix_cache_preempted_queries: Tokens of requests looked up as they came back from a
            preemption; they count in none of the others.
        prefix_cache_preempted_hits: Those found there.
        kv_block_residency: How long a sample of the blocks lived, lay idle and waited for reuse.
        num_allocated_slots: Token positions in blocks that running requests hold, each
            block counted once.
        num_used_slots: Those that hold a computed token. Both are counted every few steps only;
            between, they are those of the last count.
        num_corrupted_reqs: Requests that had logits that are no finite numbers, where they are
            checked.
        num_replaced_engines: Where several engines count as one, how often another took the place
            of one that had died, while this one's start time stayed as it was.
        step_token_counts: Steps in each bucket alone of `STEP_TOKEN_BUCKETS`, and of more tokens;
            a burst counts as its steps.
        expert_tokens: Layer -> how many tokens went to each of its experts, with
            `expert_load_window`. A step's message only has it if it has changed; {} says that it is
            as before, or that nothing is counted. Of several engines, only `engines` have it.
        engine_start_time: Seconds since the epoch. Another one is another engine, whose counters
            began at 0 again.
        engines: Where several engines count as one: what each of them says, in their order. Its
            counters go on from those of the engines in whose place it is, though its start time is
            its own. () is one engine.
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
        """Share of the token positions in held blocks that hold no token; 0 without any."""
        if self.num_allocated_slots == 0:
            return 0.0
        return 1.0 - self.num_used_slots / self.num_allocated_slots

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the most recent requests' tokens that were found; 0 before the first."""
        if self.prefix_cache_recent_queries == 0:
            return 0.0
        return self.prefix_cache_recent_hits / self.prefix_cache_recent_queries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All outputs of one step, for one client.

    Args:
        timestamp: Seconds since the epoch.
        monotonic_s: Seconds on a clock that nobody sets, of the engine's machine.
        request_times: By request id, of those who have their first token in this step.
        engine_idx: Which of several engines computed it.
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
        retry_after_s: Another is being started in its place, and may be ready after so many
            seconds; None where nobody will come.
        request_ids: Those that have ended with it, where it was one engine of several: the others
            go on. None is all requests.
    """

    reason: str
    retry_after_s: int | None = None
    request_ids: tuple[str, ...] | None = None


# What an engine may send; `contracts/wire.py` writes them as bytes.
EngineOutput = StepOutputs | UtilityReply | EngineDead
