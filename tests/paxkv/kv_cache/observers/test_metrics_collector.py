"""Block residency: durations computed by hand, and a fair sample."""

import math
import random
import types

import pytest

from paxkv.contracts.observation import RESIDENCY_BUCKETS_S
from paxkv.kv_cache.observers.metrics_collector import (
    KVCacheMetricsCollector,
    make_metrics_collector,
)
from paxkv.kv_cache.pool.block_pool import BlockPool


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_pool(num_blocks=4, sample_share=1.0):
    clock = Clock()
    collector = KVCacheMetricsCollector(sample_share, clock=clock, rng=random.Random(0))
    pool = BlockPool(num_blocks=num_blocks, enable_caching=True, observers=[collector])
    return pool, collector, clock


def cache(pool, blocks):
    pool.cache_full_blocks(
        request=types.SimpleNamespace(block_hashes=[bytes([b.block_id]) for b in blocks]),
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=len(blocks),
        block_size=16,
        kv_cache_group_id=0,
    )


def durations(histogram):
    """Counts of buckets that are not empty, by upper bound, and the sum."""
    bounds = (*RESIDENCY_BUCKETS_S, math.inf)
    counts = zip(bounds, histogram.bucket_counts, strict=True)
    return {bound: count for bound, count in counts if count}, histogram.sum_s


def test_lifetime_is_measured_from_allocation_to_reallocation():
    pool, collector, clock = make_pool(num_blocks=2)
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block])
    clock.now += 3
    pool.free_blocks([block])
    clock.now += 4
    pool.touch([block])  # after 7 s: a reuse
    clock.now += 0.5
    pool.touch([block])  # after 0.5 s: another
    clock.now += 6
    pool.free_blocks([block])
    pool.free_blocks([block])
    clock.now += 15
    assert durations(collector.snapshot().lifetime) == ({}, 0)
    pool.get_new_blocks(1)
    residency = collector.snapshot()
    # 3 + 4 + 0.5 + 6 + 15 s, of which the block was idle for the last 15.
    assert durations(residency.lifetime) == ({30: 1}, 28.5)
    assert durations(residency.idle_before_evict) == ({20: 1}, 15)
    assert durations(residency.reuse_gap) == ({10: 1, 0.5: 1}, 7.5)


def test_a_block_evicted_while_held_was_never_idle():
    pool, collector, clock = make_pool()
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks)
    clock.now += 8
    pool.evict(blocks[:1])
    residency = collector.snapshot()
    assert durations(residency.lifetime) == ({10: 1}, 8)
    assert durations(residency.idle_before_evict) == ({0.001: 1}, 0)
    # Its lifetime is over, so further events of the block are not counted.
    clock.now += 8
    pool.free_blocks(blocks[:1])
    pool.get_new_blocks(2)
    assert durations(collector.snapshot().lifetime) == ({10: 1}, 8)


def test_an_evicted_block_was_not_idle_after_a_hit():
    pool, collector, clock = make_pool()
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks)
    pool.free_blocks(blocks)
    clock.now += 8
    pool.touch(blocks)
    clock.now += 8
    pool.evict(blocks)
    assert durations(collector.snapshot().idle_before_evict) == ({0.001: 1}, 0)


def test_lifetime_of_a_block_that_was_never_cached_is_measured():
    pool, collector, clock = make_pool(num_blocks=2)
    pool.free_blocks(pool.get_new_blocks(1))
    clock.now += 2
    pool.get_new_blocks(1)
    assert durations(collector.snapshot().lifetime) == ({2: 1}, 2)


def test_a_reset_drops_the_blocks_and_keeps_the_counts():
    pool, collector, clock = make_pool(num_blocks=3)
    first, second = pool.get_new_blocks(2)
    cache(pool, [first, second])
    pool.evict([first])
    pool.free_blocks([first, second])
    clock.now += 9
    assert pool.reset_prefix_cache()
    pool.get_new_blocks(2)
    assert durations(collector.snapshot().lifetime) == ({0.001: 1}, 0)


def test_the_longest_durations_have_a_bucket():
    pool, collector, clock = make_pool(num_blocks=2)
    pool.get_new_blocks(1)
    clock.now += 10**6
    pool.evict_blocks([1])  # not cached, so no lifetime ends
    pool.free_blocks([pool.blocks[1]])
    pool.get_new_blocks(1)
    assert durations(collector.snapshot().lifetime) == ({math.inf: 1}, 10**6)


def test_the_snapshot_is_the_same_object_until_a_count_changes():
    pool, collector, _ = make_pool(num_blocks=2)
    before = collector.snapshot()
    assert collector.snapshot() is before
    pool.free_blocks(pool.get_new_blocks(1))
    pool.get_new_blocks(1)
    assert collector.snapshot() != before


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("num_at_once", [1, 7, 100])
def test_the_sampled_share_does_not_depend_on_batch_sizes(share, num_at_once):
    num_blocks = 20_000 // num_at_once * num_at_once
    pool, collector, _ = make_pool(num_blocks=num_at_once + 1, sample_share=share)
    for _ in range(num_blocks // num_at_once + 1):  # the last round ends all lifetimes
        pool.free_blocks(pool.get_new_blocks(num_at_once))
    num_followed = sum(collector.snapshot().lifetime.bucket_counts)
    # Five standard deviations of a binomial.
    assert abs(num_followed - share * num_blocks) <= 5 * math.sqrt(num_blocks * share * (1 - share))


def test_every_place_in_a_batch_is_equally_likely():
    """Sampling by gaps must not prefer the first blocks of an allocation."""
    counts = [0] * 4
    clock = Clock()
    collector = KVCacheMetricsCollector(0.5, clock=clock, rng=random.Random(1))
    blocks = BlockPool(num_blocks=5, enable_caching=False).blocks[1:]
    for _ in range(2000):
        collector.on_allocated(blocks)
        for place, block in enumerate(blocks):
            before = sum(collector.snapshot().lifetime.bucket_counts)
            collector.on_evicted([block], [], ())
            counts[place] += sum(collector.snapshot().lifetime.bucket_counts) - before
    assert all(abs(count - 1000) < 5 * math.sqrt(500) for count in counts)


def test_a_share_of_0_needs_no_collector():
    assert make_metrics_collector(0.0) is None
    assert make_metrics_collector(0.5) is not None
