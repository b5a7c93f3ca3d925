"""Counters never fall, even if an engine is replaced."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency, ResidencyHistogram
from paxkv.fleet.stats_sum import COUNTERS
from paxkv.server.metrics.engine_totals import EngineTotals


def _stats(start_time, count):
    buckets = SchedulerStats().kv_block_residency.lifetime.bucket_counts
    lifetime = ResidencyHistogram(bucket_counts=(count, *buckets[1:]), sum_s=float(count))
    return SchedulerStats(
        engine_start_time=start_time,
        kv_block_residency=BlockResidency(lifetime=lifetime),
        step_token_counts=(count, *SchedulerStats().step_token_counts[1:]),
        num_waiting_reqs=count,
        expert_tokens={2: (count, 0)},
        **dict.fromkeys(COUNTERS, count),
    )


# How much each engine had counted at each scrape.
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), max_size=5))
def test_every_count_is_the_sum_over_the_engines(engines):
    totals, ended = EngineTotals(), 0
    for number, increments in enumerate(engines):
        count = 0
        for increment in increments:
            count += increment
            seen = totals.update(_stats(100.0 + number, count))
            expected = ended + count
            assert {getattr(seen, name) for name in COUNTERS} == {expected}
            assert seen.step_token_counts[0] == expected
            assert seen.expert_tokens == {2: (expected, 0)}
            lifetime = seen.kv_block_residency.lifetime
            assert (lifetime.bucket_counts[0], lifetime.sum_s) == (expected, expected)
            assert seen.num_waiting_reqs == count
        ended += count
    assert totals.num_restarts == max(len(engines) - 1, 0)


def test_counters_survive_a_restart_of_the_engine():
    totals = EngineTotals()
    totals.update(_stats(1.0, 5))
    assert totals.update(SchedulerStats()).num_steps == 5
    assert totals.update(_stats(2.0, 3)).num_steps == 8
    assert totals.num_restarts == 1


def test_a_late_step_record_does_not_lower_counters_of_experts():
    # An idle engine counts a window when it is asked: no other counter tells which is newer.
    totals = EngineTotals()
    step, answer = (
        msgspec.structs.replace(
            _stats(1.0, 5), expert_tokens={2: (count, 0)}, engines=(_stats(1.0, count),)
        )
        for count in (0, 7)
    )
    totals.record(step)
    assert totals.update(answer).expert_tokens == {2: (7, 0)}
    seen = totals.update(step)
    assert seen.expert_tokens == {2: (7, 0)}
    assert seen.engines[0].expert_tokens == {2: (7, 0)}


def test_a_late_step_record_does_not_lower_counters():
    totals = EngineTotals()
    totals.update(_stats(1.0, 5))
    totals.record(_stats(1.0, 4))
    # Nor where it is all that is known, because the engine has ended or does not answer.
    seen = totals.update(_stats(1.0, 4))
    counts = (seen.num_steps, seen.step_token_counts[0], seen.kv_block_residency.lifetime.sum_s)
    assert (counts, seen.num_waiting_reqs) == ((5, 5, 5.0), 4)
    assert totals.update(_stats(2.0, 1)).num_steps == 6


def test_a_late_step_record_of_one_of_several_engines_does_not_lower_counters():
    totals = EngineTotals()
    latest, earlier = (
        msgspec.structs.replace(_stats(1.0, 7 + n), engines=(_stats(1.0, 7), _stats(2.0, n)))
        for n in (5, 4)
    )
    totals.update(latest)
    seen = totals.update(earlier)
    assert [engine.num_steps for engine in seen.engines] == [7, 5]
    assert [engine.num_waiting_reqs for engine in seen.engines] == [7, 4]


def test_every_number_that_only_grows_is_a_counter():
    """A new field must be sorted into one of the two kinds here, and in the source."""
    numbers = {field.name for field in msgspec.structs.fields(SchedulerStats) if field.type is int}
    snapshots = {
        "num_running_reqs",
        "num_waiting_reqs",
        "num_compiling_reqs",
        "num_blocks",
        "num_free_blocks",
        "num_allocated_slots",
        "num_used_slots",
        "prefix_cache_recent_queries",
        "prefix_cache_recent_hits",
    }
    assert numbers - snapshots == set(COUNTERS)
