"""Sums of engines' statistics: counters, gauges, and the other fields named here."""

import msgspec
import pytest

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency, ResidencyHistogram
from paxkv.fleet.stats_sum import (
    COUNTERS,
    GAUGES,
    add_counters,
    keep_expert_tokens,
    stop_running,
    sum_stats,
)

OTHERS = {
    "num_accepted_per_pos",
    "kv_block_residency",
    "step_token_counts",
    "expert_tokens",
    "kv_cache_usage",
    "engine_start_time",
    "engines",
}
GAP = ResidencyHistogram(bucket_counts=(4, *[0] * 22), sum_s=2.0)
STATS = SchedulerStats(
    **dict.fromkeys(COUNTERS, 5),
    **dict.fromkeys(GAUGES, 7),
    num_accepted_per_pos=(4, 1),
    kv_block_residency=BlockResidency(reuse_gap=GAP),
    step_token_counts=(3, *SchedulerStats().step_token_counts[1:]),
    kv_cache_usage=0.5,
    engine_start_time=10.0,
)


def test_every_field_is_a_counter_a_gauge_or_listed_here() -> None:
    named = [*COUNTERS, *GAUGES, *OTHERS]
    assert sorted(named) == sorted(field.name for field in msgspec.structs.fields(SchedulerStats))


def test_counters_and_gauges_of_several_engines_are_summed() -> None:
    later = msgspec.structs.replace(STATS, engine_start_time=11.0, kv_cache_usage=0.1)
    total = sum_stats([STATS, later, later])
    assert {getattr(total, name) for name in COUNTERS} == {15}
    assert {getattr(total, name) for name in GAUGES} == {21}
    assert total.step_token_counts[0] == 9
    assert total.num_accepted_per_pos == (12, 3)
    gap = total.kv_block_residency.reuse_gap
    assert (gap.bucket_counts[0], gap.sum_s) == (12, 6.0)
    assert total.kv_cache_usage == pytest.approx(0.7 / 3)
    assert total.engine_start_time == 11.0
    assert sum_stats([STATS]) == STATS
    assert sum_stats([SchedulerStats()]).kv_cache_usage == 0.0


def test_only_counters_of_a_dead_engine_are_added() -> None:
    left = add_counters(SchedulerStats(), STATS)
    assert {getattr(left, name) for name in COUNTERS} == {5}
    assert {getattr(left, name) for name in (*GAUGES, "kv_cache_usage")} == {0}
    assert left.step_token_counts == STATS.step_token_counts
    assert left.num_accepted_per_pos == STATS.num_accepted_per_pos
    assert left.kv_block_residency == STATS.kv_block_residency


def test_stop_running_clears_requests_and_usage_of_every_engine() -> None:
    ended = stop_running(msgspec.structs.replace(STATS, engines=(STATS, STATS)))
    for one in (ended, *ended.engines):
        assert (one.num_running_reqs, one.num_waiting_reqs, one.num_compiling_reqs) == (0, 0, 0)
        assert (one.kv_cache_usage, one.num_steps, one.num_blocks) == (0.0, 5, 7)


def test_expert_tokens_are_kept_until_the_same_engine_reports_new_ones() -> None:
    before = SchedulerStats(engine_start_time=1.0, expert_tokens={3: (5, 0)})
    step = SchedulerStats(engine_start_time=1.0, num_steps=8)
    kept = keep_expert_tokens(step, before)
    assert (kept.expert_tokens, kept.num_steps) == ({3: (5, 0)}, 8)
    newer = msgspec.structs.replace(step, expert_tokens={3: (6, 1)})
    assert keep_expert_tokens(newer, before) is newer
    other = SchedulerStats(engine_start_time=2.0)
    assert keep_expert_tokens(other, before) is other


def test_expert_tokens_of_successive_engines_are_added() -> None:
    before = SchedulerStats(expert_tokens={1: (5, 0), 3: (2, 3)})
    now = SchedulerStats(expert_tokens={1: (1, 1), 3: (0, 7)})
    assert add_counters(now, before).expert_tokens == {1: (6, 1), 3: (2, 10)}
    for nothing in (add_counters(SchedulerStats(), before), add_counters(before, SchedulerStats())):
        assert nothing.expert_tokens == before.expert_tokens
    assert sum_stats([now, before]).expert_tokens == {}
