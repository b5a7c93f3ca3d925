"""Adds up the engine's counters over restarts, because Prometheus' counters never decrease."""

import msgspec

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency
from paxkv.fleet.stats_sum import COUNTERS, add_counters, keep_expert_tokens


class EngineTotals:
    """Converts the counts of successive engines to counts since the server's start.

    Counts between the last call for an engine and the engine's end are lost.
    """

    def __init__(self) -> None:
        self._ended = SchedulerStats()
        self._latest = SchedulerStats()
        self._num_restarts = 0

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    def record(self, stats: SchedulerStats) -> None:
        """Records an engine's counts, because the engine may end before the next call."""
        if stats.engine_start_time != self._latest.engine_start_time:
            self._num_restarts += self._latest.engine_start_time > 0
            self._ended = add_counters(self._latest, self._ended)
        elif any(getattr(stats, name) < getattr(self._latest, name) for name in COUNTERS):
            # These counts are older than the recorded ones.
            return
        self._latest = keep_expert_tokens(stats, self._latest)

    def update(self, stats: SchedulerStats) -> SchedulerStats:
        """Returns `stats` with the latest counters, plus the counters of earlier engines."""
        self.record(stats)
        return add_counters(_with_counters(stats, self._latest), self._ended)


def _with_counters(stats: SchedulerStats, latest: SchedulerStats) -> SchedulerStats:
    """Returns `stats`, which may be older, with the counters of `latest`, also for each engine."""
    gauges = msgspec.structs.replace(
        stats,
        **dict.fromkeys(COUNTERS, 0),
        num_accepted_per_pos=(),
        kv_block_residency=BlockResidency(),
        step_token_counts=SchedulerStats().step_token_counts,
        expert_tokens={},
        engines=tuple(map(_with_counters, stats.engines, latest.engines)),
    )
    return add_counters(gauges, latest)
