"""The engine's counters, added up over restarts: Prometheus' counters never go back."""

import dataclasses

import msgspec

from paxkv.contracts.block_residency import BlockResidency, ResidencyHistogram
from paxkv.contracts.engine_output import SchedulerStats

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
)
_HISTOGRAMS = tuple(field.name for field in dataclasses.fields(BlockResidency))


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
            self._ended = _add(self._latest, self._ended)
        elif any(getattr(stats, name) < getattr(self._latest, name) for name in COUNTERS):
            # Of a step that ended before the engine was asked.
            return
        self._latest = stats

    def update(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with its counters raised by those of the engines before it."""
        self.note(stats)
        return _add(stats, self._ended)


def _add(stats: SchedulerStats, more: SchedulerStats) -> SchedulerStats:
    counters = {name: getattr(stats, name) + getattr(more, name) for name in COUNTERS}
    residency = {
        name: _add_histograms(
            getattr(stats.kv_block_residency, name), getattr(more.kv_block_residency, name)
        )
        for name in _HISTOGRAMS
    }
    return msgspec.structs.replace(
        stats,
        **counters,
        kv_block_residency=BlockResidency(**residency),
        step_token_counts=_add_counts(stats.step_token_counts, more.step_token_counts),
    )


def _add_histograms(a: ResidencyHistogram, b: ResidencyHistogram) -> ResidencyHistogram:
    return ResidencyHistogram(
        bucket_counts=_add_counts(a.bucket_counts, b.bucket_counts), sum_s=a.sum_s + b.sum_s
    )


def _add_counts(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
