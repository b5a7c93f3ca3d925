"""The engine's own counts as Prometheus metrics, which are made at each scrape."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paxkv.contracts.engine_output import STEP_TOKEN_BUCKETS, SchedulerStats
from paxkv.contracts.observation import RESIDENCY_BUCKETS_S, ResidencyHistogram
from paxkv.server.metrics.engine_totals import EngineTotals

# Labels of every metric. An engine's label is its number, by which vLLM's dashboards filter.
LABELS = ("model_name", "engine")
# The engine label of metrics that are not counted per engine.
FIRST_ENGINE = "0"
Labels = tuple[str, str]
_T = TypeVar("_T")

# Name without `_total`, field of SchedulerStats, help.
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "prompt tokens looked up in the cache"),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "prompt tokens found in the prefix cache"),
    ("vllm:num_preemptions", "num_preemptions", "preemptions: requests that lost their KV blocks"),
    (
        "vllm:corrupted_requests",
        "num_corrupted_reqs",
        "requests with logits that are not finite; 0 without --check-logits",
    ),
    (
        "paxkv:prefix_cache_preempted_queries",
        "prefix_cache_preempted_queries",
        "tokens looked up in the prefix cache for requests that were preempted before",
    ),
    (
        "paxkv:prefix_cache_preempted_hits",
        "prefix_cache_preempted_hits",
        "tokens found in the prefix cache for requests that were preempted before",
    ),
    ("vllm:spec_decode_num_drafts", "num_drafts", "answers to drafts, one per request and step"),
    ("vllm:spec_decode_num_draft_tokens", "num_draft_tokens", "drafts that steps verified"),
    ("vllm:spec_decode_num_accepted_tokens", "num_accepted_tokens", "drafts that were accepted"),
    ("paxkv:steps", "num_steps", "engine steps; a burst counts as one"),
    ("paxkv:scheduled_tokens", "num_scheduled_tokens", "tokens computed, without padding"),
    ("paxkv:padded_tokens", "num_padded_tokens", "padding tokens computed"),
    (
        "paxkv:compiles_after_ready",
        "num_compiles_after_ready",
        "programs compiled after the warm-up; should be 0",
    ),
    (
        "paxkv_compiles_after_ready",
        "num_compiles_after_ready",
        "paxkv:compiles_after_ready_total under a name without a colon",
    ),
)
_PADDING_HELP = "share of all computed tokens that were padding, since the engine's start"
_GAUGES = (
    ("vllm:num_requests_running", "num_running_reqs", "requests in the running batch"),
    ("vllm:num_requests_waiting", "num_waiting_reqs", "requests that wait to run"),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "share of KV blocks in use, from 0 to 1"),
    (
        "paxkv:prefix_cache_hit_rate",
        "prefix_cache_hit_rate",
        "share of the most recent requests' prompt tokens found in the prefix cache",
    ),
    ("paxkv:padding_waste_ratio", "padding_waste_ratio", _PADDING_HELP),
    ("padding_waste_ratio", "padding_waste_ratio", _PADDING_HELP),
    ("paxkv:kv_blocks", "num_blocks", "KV blocks of the pool"),
    ("paxkv:kv_blocks_free", "num_free_blocks", "KV blocks that are free"),
    ("paxkv:kv_slots_allocated", "num_allocated_slots", "token positions in held blocks"),
    ("paxkv:kv_slots_used", "num_used_slots", "token positions that hold a token"),
    (
        "paxkv:kv_waste_ratio",
        "kv_waste_ratio",
        "share of the token positions in held blocks that hold no token",
    ),
    ("paxkv:engine_start_time_seconds", "engine_start_time", "engine start time since the epoch"),
)
# Name, field of BlockResidency, help. Only a sample of the blocks is observed.
_BLOCK_HISTOGRAMS = (
    (
        "vllm:kv_block_lifetime_seconds",
        "lifetime",
        "from the allocation of a KV block to the eviction of its content",
    ),
    (
        "vllm:kv_block_idle_before_evict_seconds",
        "idle_before_evict",
        "last part of a KV block's lifetime, in which no request held it",
    ),
    (
        "vllm:kv_block_reuse_gap_seconds",
        "reuse_gap",
        "from one use of a KV block to the next prefix hit on it",
    ),
)


class EngineCollector(Collector):
    """Makes metrics of the latest counts."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._totals = EngineTotals()
        self._engines: tuple[SchedulerStats, ...] = (SchedulerStats(),)

    def record(self, stats: SchedulerStats) -> None:
        """Records the counts of an engine, which may end before the next `update`."""
        self._totals.record(stats)

    def update(self, stats: SchedulerStats) -> None:
        stats = self._totals.update(stats)
        self._engines = stats.engines or (stats,)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that the registry does not collect metrics to learn their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        engines = label_engines(self._model_name, self._engines)
        for name, field, help_text in _COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for labels, stats in engines:
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        restarts = CounterMetricFamily(
            "paxkv:engine_restarts", "engines that ended and were replaced", None, LABELS
        )
        for labels, stats in engines:
            # `_totals` counts restarts of a single engine, `stats` those among several engines.
            num_restarts = self._totals.num_restarts + stats.num_replaced_engines
            restarts.add_metric(labels, num_restarts)
        yield restarts
        if any(stats.expert_tokens for _, stats in engines):
            yield _make_expert_counter(engines)
        if any(stats.num_accepted_per_pos for _, stats in engines):
            yield _make_position_counter(engines)
        for name, field, help_text in _GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for labels, stats in engines:
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        yield make_histogram(
            "vllm:iteration_tokens_total",
            "tokens per step",
            STEP_TOKEN_BUCKETS,
            [
                (labels, stats.step_token_counts, stats.num_scheduled_tokens)
                for labels, stats in engines
            ],
        )
        for name, field, help_text in _BLOCK_HISTOGRAMS:
            histograms: list[tuple[Labels, ResidencyHistogram]] = [
                (labels, getattr(stats.kv_block_residency, field)) for labels, stats in engines
            ]
            yield make_histogram(
                name,
                help_text,
                RESIDENCY_BUCKETS_S,
                [(labels, counts.bucket_counts, counts.sum_s) for labels, counts in histograms],
            )


def _make_expert_counter(engines: Iterable[tuple[Labels, SchedulerStats]]) -> CounterMetricFamily:
    counter = CounterMetricFamily(
        "paxkv:expert_tokens",
        "tokens that a layer routed to an expert",
        labels=(*LABELS, "layer", "expert"),
    )
    for labels, stats in engines:
        for layer_idx, counts in stats.expert_tokens.items():
            for expert_id, count in enumerate(counts):
                counter.add_metric((*labels, str(layer_idx), str(expert_id)), count)
    return counter


def _make_position_counter(engines: Iterable[tuple[Labels, SchedulerStats]]) -> CounterMetricFamily:
    counter = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "drafts that were accepted, by position among the drafts of a request",
        labels=(*LABELS, "position"),
    )
    for labels, stats in engines:
        for position, count in enumerate(stats.num_accepted_per_pos):
            counter.add_metric((*labels, str(position)), count)
    return counter


def label_engines(model_name: str, engines: Sequence[_T]) -> list[tuple[Labels, _T]]:
    """Adds the values of `LABELS` to the item of each engine."""
    return [((model_name, str(idx)), of_engine) for idx, of_engine in enumerate(engines)]


def make_histogram(
    name: str,
    help_text: str,
    bounds: Sequence[float],
    rows: Iterable[tuple[Labels, Sequence[int], float]],
) -> HistogramMetricFamily:
    """Makes a histogram from counts per bucket; Prometheus needs cumulative counts.

    Args:
        rows: For each engine: labels, counts, and the sum of the observed values.
    """
    texts = [*(str(float(bound)) for bound in bounds), "+Inf"]
    histogram = HistogramMetricFamily(name, help_text, labels=LABELS)
    for labels, bucket_counts, total in rows:
        cumulative = itertools.accumulate(bucket_counts)
        buckets = [(text, float(count)) for text, count in zip(texts, cumulative, strict=True)]
        histogram.add_metric(labels, buckets, total)
    return histogram
