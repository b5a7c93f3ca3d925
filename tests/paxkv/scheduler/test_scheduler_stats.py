"""A snapshot has the manager's numbers, and block residency if it is measured."""

import pytest

from paxkv.contracts.observation import BlockResidency
from paxkv.kv_cache.observers.metrics_collector import KVCacheMetricsCollector
from paxkv.scheduler.draft_counts import DraftCounts
from paxkv.scheduler.scheduler_stats import make_scheduler_stats
from tests.paxkv.kv_cache.cache_fakes import make_manager, run_alone


@pytest.mark.parametrize("is_measured", [False, True])
def test_block_residency_is_reported_if_it_is_measured(is_measured):
    collector = KVCacheMetricsCollector(1.0) if is_measured else None
    manager = make_manager(num_blocks=4, observers=[collector] if is_measured else [])
    for name in ("a", "b"):
        manager.free(run_alone(manager, name, [ord(name)] * 12))
    counts = DraftCounts(max_drafts=3)
    for num_accepted in (0, 2, 1):
        counts.record(3, num_accepted)
    stats = make_scheduler_stats(
        manager,
        collector,
        counts,
        slot_counts=(0, 0),
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_preemptions=0,
        num_steps=2,
        num_scheduled_tokens=24,
    )
    # "b" got the blocks of "a".
    assert sum(stats.kv_block_residency.lifetime.bucket_counts) == (3 if is_measured else 0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 3)
    assert stats.num_accepted_per_pos == (2, 1, 0)
    assert (stats.kv_block_residency == BlockResidency()) == (not is_measured)
