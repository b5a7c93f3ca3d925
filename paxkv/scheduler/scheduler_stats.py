"""Builds `SchedulerStats`, the scheduler's counters as clients receive them."""

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.observers.metrics_collector import KVCacheMetricsCollector
from paxkv.scheduler.draft_counts import DraftCounts


def make_scheduler_stats(
    manager: KVCacheManager,
    metrics_collector: KVCacheMetricsCollector | None,
    draft_counts: DraftCounts,
    *,
    slot_counts: tuple[int, int],
    num_running_reqs: int,
    num_waiting_reqs: int,
    num_preemptions: int,
    num_steps: int,
    num_scheduled_tokens: int,
) -> SchedulerStats:
    """A snapshot of the counters, in O(1); the runner's counters are 0.

    Args:
        slot_counts: Number of slots in held blocks, and number of slots with a computed token.
    """
    pool = manager.block_pool
    prefix_cache = manager.prefix_cache_stats
    num_allocated_slots, num_used_slots = slot_counts
    return SchedulerStats(
        num_running_reqs=num_running_reqs,
        num_waiting_reqs=num_waiting_reqs,
        kv_cache_usage=manager.usage,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.get_num_free_blocks(),
        num_preemptions=num_preemptions,
        prefix_cache_queries=prefix_cache.num_queries,
        prefix_cache_hits=prefix_cache.num_hits,
        prefix_cache_recent_queries=prefix_cache.recent.num_queries,
        prefix_cache_recent_hits=prefix_cache.recent.num_hits,
        prefix_cache_preempted_queries=prefix_cache.num_preempted_queries,
        prefix_cache_preempted_hits=prefix_cache.num_preempted_hits,
        kv_block_residency=(
            BlockResidency() if metrics_collector is None else metrics_collector.snapshot()
        ),
        num_allocated_slots=num_allocated_slots,
        num_used_slots=num_used_slots,
        num_steps=num_steps,
        num_scheduled_tokens=num_scheduled_tokens,
        num_drafts=draft_counts.num_drafts,
        num_draft_tokens=draft_counts.num_draft_tokens,
        num_accepted_tokens=draft_counts.num_accepted_tokens,
        num_accepted_per_pos=tuple(draft_counts.num_accepted_per_pos),
    )
