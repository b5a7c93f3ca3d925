"""Prometheus metrics under vLLM's names, so that its dashboards work here."""

import itertools
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from paxkv.contracts.block_residency import RESIDENCY_BUCKETS_S, ResidencyHistogram
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import RequestOutput

_LATENCY_BUCKETS_S = (
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
    + (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
)  # fmt: skip
_LABELS = ("model_name",)

# Name without `_total`, field of SchedulerStats, help.
_ENGINE_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "prompt tokens looked up in the cache"),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "prompt tokens found in the prefix cache"),
    (
        "paxkv_prefix_cache_preempted_queries",
        "prefix_cache_preempted_queries",
        "tokens looked up for requests that came back from a preemption",
    ),
    (
        "paxkv_prefix_cache_preempted_hits",
        "prefix_cache_preempted_hits",
        "those of them found in the prefix cache",
    ),
    ("vllm:num_preemptions", "num_preemptions", "requests that lost their KV blocks"),
    ("paxkv_steps", "num_steps", "engine steps"),
    ("paxkv_scheduled_tokens", "num_scheduled_tokens", "tokens computed"),
    ("paxkv_padded_tokens", "num_padded_tokens", "padding tokens computed besides"),
    (
        "paxkv_compiles_after_ready",
        "num_compiles_after_ready",
        "programs compiled after the warm-up; 0 is the promise",
    ),
)
_ENGINE_GAUGES = (
    ("vllm:num_requests_running", "num_running_reqs", "requests in the running batch"),
    ("vllm:num_requests_waiting", "num_waiting_reqs", "requests that wait for their turn"),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "share of KV blocks in use, 1 is all"),
    (
        "paxkv_prefix_cache_hit_rate",
        "prefix_cache_hit_rate",
        "share of the most recent requests' prompt tokens found in the prefix cache",
    ),
    (
        "paxkv_padding_waste_ratio",
        "padding_waste_ratio",
        "share of all computed tokens that were padding",
    ),
    ("paxkv_kv_blocks", "num_blocks", "KV blocks of the pool"),
    ("paxkv_kv_blocks_free", "num_free_blocks", "KV blocks that are free"),
    ("paxkv_kv_slots_allocated", "num_allocated_slots", "token positions in held blocks"),
    ("paxkv_kv_slots_used", "num_used_slots", "token positions that hold a token"),
)
# Name, field of BlockResidency, help; of the sampled share of blocks.
_BLOCK_HISTOGRAMS = (
    (
        "vllm:kv_block_lifetime_seconds",
        "lifetime",
        "from a KV block being handed out until its content is forgotten",
    ),
    (
        "vllm:kv_block_idle_before_evict_seconds",
        "idle_before_evict",
        "the last part of a KV block's life, in which nobody held it",
    ),
    (
        "vllm:kv_block_reuse_gap_seconds",
        "reuse_gap",
        "from one use of a KV block to the next prefix hit on it",
    ),
)


class ServerMetrics:
    """Counts what passes through the server, and shows the engine's own counts beside it."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stats = SchedulerStats()
        # A registry of its own: two servers in one process must not add up.
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens")
        self._generation_tokens = self._counter("vllm:generation_tokens", "tokens drawn")
        self._request_success = Counter(
            "vllm:request_success",
            "requests that finished",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "from arrival to the first token, of streams"
        )
        self._inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "between two tokens of a stream"
        )
        self._e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "from arrival to the last token"
        )

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def stats(self) -> SchedulerStats:
        """The engine's counts that the last `render` was given."""
        return self._stats

    def render(self, stats: SchedulerStats) -> bytes:
        """Everything in Prometheus' text format, with `stats` as the engine's part."""
        self._stats = stats
        return generate_latest(self._registry)

    def start_request(self, *, is_stream: bool) -> "RequestTimer":
        """Starts the clock of one prompt."""
        return RequestTimer(self, is_stream=is_stream)

    def count_prompt_tokens(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_new_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def observe_tokens(self, num_tokens: int, seconds_per_token: float) -> None:
        for _ in range(num_tokens):
            self._inter_token_latency.observe(seconds_per_token)

    def observe_finish(self, reason: str, seconds: float) -> None:
        self._request_success.labels(self._model_name, reason).inc()
        self._e2e_latency.observe(seconds)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(name, help_text, _LABELS, registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        histogram = Histogram(
            name, help_text, _LABELS, buckets=_LATENCY_BUCKETS_S, registry=self._registry
        )
        return histogram.labels(self._model_name)


class RequestTimer:
    """The clock of one prompt, fed with its outputs.

    Only a stream shows its first token when it is drawn; what comes whole is timed as a whole.
    """

    def __init__(self, metrics: ServerMetrics, *, is_stream: bool) -> None:
        self._metrics = metrics
        self._is_stream = is_stream
        self._start_time = time.perf_counter()
        # Index of a completion -> when its last token came.
        self._last_token_times: dict[int, float] = {}

    def observe(self, output: RequestOutput) -> None:
        """Counts one output; the finished one ends the clock."""
        now = time.perf_counter()
        if output.finished:
            self._metrics.count_prompt_tokens(len(output.prompt_token_ids))
        for completion in output.outputs:
            num_tokens = len(completion.token_ids)
            self._metrics.count_new_tokens(num_tokens)
            if num_tokens and self._is_stream:
                self._observe_tokens(completion.index, num_tokens, now)
            if completion.finish_reason is not None:
                self._metrics.observe_finish(completion.finish_reason, now - self._start_time)

    def _observe_tokens(self, index: int, num_tokens: int, now: float) -> None:
        if not self._last_token_times:
            self._metrics.observe_first_token(now - self._start_time)
        elif index in self._last_token_times:
            # Several tokens at once took as long as they took, each its share.
            seconds = (now - self._last_token_times[index]) / num_tokens
            self._metrics.observe_tokens(num_tokens, seconds)
        self._last_token_times[index] = now


class _EngineCollector:
    """Turns the engine's counts into metrics when someone asks for them."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = (self._metrics.model_name,)
        for name, field, help_text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=_LABELS)
            counter.add_metric(labels, getattr(self._metrics.stats, field))
            yield counter
        for name, field, help_text in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=_LABELS)
            gauge.add_metric(labels, getattr(self._metrics.stats, field))
            yield gauge
        residency = self._metrics.stats.kv_block_residency
        for name, field, help_text in _BLOCK_HISTOGRAMS:
            histogram = HistogramMetricFamily(name, help_text, labels=_LABELS)
            counts: ResidencyHistogram = getattr(residency, field)
            histogram.add_metric(labels, _cumulative_buckets(counts), counts.sum_s)
            yield histogram


def _cumulative_buckets(histogram: ResidencyHistogram) -> list[tuple[str, float]]:
    """Upper bound and count of everything up to it, as Prometheus wants them."""
    bounds = [*map(str, RESIDENCY_BUCKETS_S), "+Inf"]
    cumulative = itertools.accumulate(histogram.bucket_counts)
    return [(bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)]
