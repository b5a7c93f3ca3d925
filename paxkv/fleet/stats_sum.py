"""Combines the statistics of several engines, or of successive engines, into one."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency, ResidencyHistogram

# Scalar counters. `num_accepted_per_pos`, `kv_block_residency`, `step_token_counts` and
# `expert_tokens` are counters too.
COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_preempted_queries",
    "prefix_cache_preempted_hits",
    "num_steps",
    "num_scheduled_tokens",
    "num_padded_tokens",
    "num_compiles_after_ready",
    "num_corrupted_reqs",
    "num_replaced_engines",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)
# Current or recent values.
GAUGES = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_compiling_reqs",
    "num_blocks",
    "num_free_blocks",
    "prefix_cache_recent_queries",
    "prefix_cache_recent_hits",
    "num_allocated_slots",
    "num_used_slots",
)
_HISTOGRAMS = tuple(field.name for field in dataclasses.fields(BlockResidency))


def add_counters(stats: SchedulerStats, more: SchedulerStats) -> SchedulerStats:
    """Returns `stats` with the counters of `more` added."""
    counters = {name: getattr(stats, name) + getattr(more, name) for name in COUNTERS}
    residency = stats.kv_block_residency
    # An empty `kv_block_residency` is the usual case: no block was sampled.
    if more.kv_block_residency != BlockResidency():
        histograms = {
            name: _add_histograms(getattr(residency, name), getattr(more.kv_block_residency, name))
            for name in _HISTOGRAMS
        }
        residency = BlockResidency(**histograms)
    return msgspec.structs.replace(
        stats,
        **counters,
        kv_block_residency=residency,
        num_accepted_per_pos=_add_positions(stats.num_accepted_per_pos, more.num_accepted_per_pos),
        step_token_counts=_add_counts(stats.step_token_counts, more.step_token_counts),
        expert_tokens=_add_layers(stats.expert_tokens, more.expert_tokens),
    )


def keep_expert_tokens(stats: SchedulerStats, before: SchedulerStats) -> SchedulerStats:
    """Returns `stats` with the expert tokens of `before`, if its own are missing or older.

    They can be older, because an idle engine also counts tokens for a `get_stats` call. The client
    may handle this reply before the statistics of the last step. Does the same for `stats.engines`.

    Args:
        before: The last known statistics. Ignored if they are of another engine.
    """
    if len(stats.engines) == len(before.engines) > 0:
        engines = tuple(map(keep_expert_tokens, stats.engines, before.engines))
        stats = msgspec.structs.replace(stats, engines=engines)
    own, known = stats.expert_tokens, before.expert_tokens
    if own is known or not known or stats.engine_start_time != before.engine_start_time:
        return stats
    if own and _num_choices(own) >= _num_choices(known):
        return stats
    return msgspec.structs.replace(stats, expert_tokens=known)


def _num_choices(expert_tokens: Mapping[int, Sequence[int]]) -> int:
    return sum(map(sum, expert_tokens.values()))


def sum_stats(all_stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Sums the statistics of several engines; the start time is the latest one.

    Expert tokens are omitted, because the sum would add thousands of numbers per step.
    """
    total, *others = (msgspec.structs.replace(stats, expert_tokens={}) for stats in all_stats)
    for stats in others:
        total = add_counters(total, stats)
    num_blocks = sum(stats.num_blocks for stats in all_stats)
    num_used = sum(stats.kv_cache_usage * stats.num_blocks for stats in all_stats)
    return msgspec.structs.replace(
        total,
        **{name: sum(getattr(stats, name) for stats in all_stats) for name in GAUGES},
        kv_cache_usage=num_used / num_blocks if num_blocks else 0.0,
        engine_start_time=max(stats.engine_start_time for stats in all_stats),
    )


def stop_running(stats: SchedulerStats) -> SchedulerStats:
    """Clears the requests and cache usage in `stats` after all engines ended; keeps counters."""
    return msgspec.structs.replace(
        stats,
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_compiling_reqs=0,
        kv_cache_usage=0.0,
        engines=tuple(map(stop_running, stats.engines)),
    )


def _add_histograms(a: ResidencyHistogram, b: ResidencyHistogram) -> ResidencyHistogram:
    return ResidencyHistogram(
        bucket_counts=_add_counts(a.bucket_counts, b.bucket_counts), sum_s=a.sum_s + b.sum_s
    )


def _add_counts(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _add_positions(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Adds counts by position; missing positions count as zeros."""
    return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))


def _add_layers(
    a: dict[int, tuple[int, ...]], b: dict[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Adds the counts of each layer; an empty dict counts as zeros."""
    if not (a and b):
        return a or b
    return {layer_idx: _add_counts(counts, b[layer_idx]) for layer_idx, counts in a.items()}
