"""KVCacheMetricsCollector: samples how long blocks live, are idle, and wait for reuse."""

import bisect
import math
import random
import time
from collections.abc import Callable, Container, Iterable, Sequence

from paxkv.contracts.observation import RESIDENCY_BUCKETS_S, BlockResidency, ResidencyHistogram
from paxkv.kv_cache.hashing.block_hash import BlockHashWithGroupId
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock


class _Residency:
    """One stay of a sampled block in the cache. Times are in seconds."""

    __slots__ = ("birth", "idle_since", "last_use")

    def __init__(self, now: float) -> None:
        self.birth = now
        self.last_use = now
        # When the last holder released the block; None while it has a holder.
        self.idle_since: float | None = None


class _Histogram:
    """Counts durations by `RESIDENCY_BUCKETS_S`."""

    def __init__(self) -> None:
        self._bucket_counts = [0] * (len(RESIDENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        # A duration equal to a bound belongs to the bucket below it, as in Prometheus.
        self._bucket_counts[bisect.bisect_left(RESIDENCY_BUCKETS_S, duration_s)] += 1
        self._sum_s += duration_s

    def snapshot(self) -> ResidencyHistogram:
        return ResidencyHistogram(bucket_counts=tuple(self._bucket_counts), sum_s=self._sum_s)


class KVCacheMetricsCollector(BlockPoolObserver):
    """Tracks a random sample of the blocks that a pool allocates.

    Every allocated block is sampled with the same probability, independently. The collector draws
    the gaps between sampled blocks, so the blocks in a gap cost nothing.

    Args:
        sample_share: Share of the allocated blocks to sample, in [0, 1].
        clock: A monotonic clock, in seconds.
        rng: Draws the gaps.

    Source: vLLM `v1/core/kv_cache_metrics.py`. There a block is idle after its last hit, even while
    a request holds it; here it is idle while it has no holder.
    """

    def __init__(
        self,
        sample_share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._sample_share = sample_share
        self._clock = clock
        self._rng = random.Random() if rng is None else rng
        self._residencies: dict[int, _Residency] = {}
        # Number of blocks to allocate before the next sampled one.
        self._num_to_skip = self._draw_gap()
        self._lifetime = _Histogram()
        self._idle_before_evict = _Histogram()
        self._reuse_gap = _Histogram()
        self._snapshot: BlockResidency | None = None

    def on_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Ends the stays of the blocks' old content, and samples some of the blocks."""
        self._end_stays(blocks)
        while self._num_to_skip < len(blocks):
            block = blocks[int(self._num_to_skip)]
            self._residencies[block.block_id] = _Residency(self._clock())
            self._num_to_skip += 1 + self._draw_gap()
        self._num_to_skip -= len(blocks)

    def on_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        if not self._residencies:
            return
        for block in blocks:
            residency = self._residencies.get(block.block_id)
            if residency is not None:
                now = self._clock()
                self._reuse_gap.observe(now - residency.last_use)
                residency.last_use = now
                residency.idle_since = None
                self._snapshot = None

    def on_released(
        self, blocks: Sequence[KVCacheBlock], free_blocks: Sequence[KVCacheBlock]
    ) -> None:
        residencies = self._residencies
        if not residencies:
            return
        for block in free_blocks:
            if block.block_id in residencies:
                residencies[block.block_id].idle_since = self._clock()

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        self._end_stays(blocks)

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Stops tracking the sampled blocks; the counts stay."""
        self._residencies.clear()

    def snapshot(self) -> BlockResidency:
        """The counts since the start. Returns the same object until a count changes."""
        if self._snapshot is None:
            self._snapshot = BlockResidency(
                lifetime=self._lifetime.snapshot(),
                idle_before_evict=self._idle_before_evict.snapshot(),
                reuse_gap=self._reuse_gap.snapshot(),
            )
        return self._snapshot

    def _end_stays(self, blocks: Iterable[KVCacheBlock]) -> None:
        residencies = self._residencies
        if not residencies:
            return
        for block in blocks:
            if block.block_id in residencies:
                self._end(residencies.pop(block.block_id))

    def _end(self, residency: _Residency) -> None:
        now = self._clock()
        idle_since = now if residency.idle_since is None else residency.idle_since
        self._lifetime.observe(now - residency.birth)
        self._idle_before_evict.observe(now - idle_since)
        self._snapshot = None

    def _draw_gap(self) -> float:
        """Number of blocks before the next sampled one, geometrically distributed."""
        if self._sample_share <= 0:
            return math.inf
        if self._sample_share >= 1:
            return 0
        # 1 - random() is in (0, 1], so the logarithm is finite.
        return math.floor(math.log(1 - self._rng.random()) / math.log1p(-self._sample_share))


def make_metrics_collector(sample_share: float) -> KVCacheMetricsCollector | None:
    """A collector for `CacheConfig.kv_cache_metrics_sample`; None if it is 0."""
    return KVCacheMetricsCollector(sample_share) if sample_share > 0 else None
