"""The engine's counters, added up over restarts: Prometheus' counters never go back."""

import msgspec

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.observation import BlockResidency
from paxkv.fleet.stats_sum import COUNTERS, add_counters, keep_expert_tokens


class EngineTotals:
    """Turns the counts of one engine after another into counts since the server's start.

    What an engine counted after it was last noted, and before it ended, is lost.
    """

    def __init__(self) -> None:
        self._ended = SchedulerStats()
        self._latest = SchedulerStats()
        self._num_restarts = 0

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    def note(self, stats: SchedulerStats) -> None:
        """Remembers how far an engine has come, which may end before it is asked again."""
        if stats.engine_start_time != self._latest.engine_start_time:
            self._num_restarts += self._latest.engine_start_time > 0
            self._ended = add_counters(self._latest, self._ended)
        elif any(getattr(stats, name) < getattr(self._latest, name) for name in COUNTERS):
            # Of a step that ended before the engine was asked.
            return
        self._latest = keep_expert_tokens(stats, self._latest)

    def update(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with counters as of the latest that was noted, and of the engines before it."""
        self.note(stats)
        return add_counters(_with_counters(stats, self._latest), self._ended)


def _with_counters(stats: SchedulerStats, latest: SchedulerStats) -> SchedulerStats:
    """`stats`, which may be of an earlier step, with `latest`'s counters; also engine by engine."""
    gauges = msgspec.structs.replace(
        stats,
        **dict.fromkeys(COUNTERS, 0),
        kv_block_residency=BlockResidency(),
        step_token_counts=SchedulerStats().step_token_counts,
        expert_tokens={},
        engines=tuple(map(_with_counters, stats.engines, latest.engines)),
    )
    return add_counters(gauges, latest)
