"""Metrics that routers and newer dashboards of vLLM read."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import TokenTotals
from paxkv.server.metrics.engine_metrics import LABELS, label_engines

# vLLM's label values. paxkv's only cache is in the memory of the device.
_DEVICE = "device"
_OTHER_SOURCES = ("host", "p2p", "disk", "external_unspecified")
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class RouterCollector(Collector):
    """Makes metrics of the latest counts."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._engines: tuple[SchedulerStats, ...] = (SchedulerStats(),)
        self._totals: tuple[TokenTotals, ...] = (TokenTotals(),)

    def update(self, stats: SchedulerStats, totals: TokenTotals) -> None:
        self._engines = stats.engines or (stats,)
        self._totals = totals.engines or (totals,)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that the registry does not collect metrics to learn their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._lora_info()
        yield self._waiting_by_reason()
        yield self._cached_by_source()

    def _lora_info(self) -> Metric:
        """A constant, because adapters are not supported. Gateways warn if it is missing."""
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "adapters of running and waiting requests, as labels; the value is the current time",
            labels=_LORA_LABELS,
        )
        info.add_metric(("0", "", ""), time.time())
        return info

    def _waiting_by_reason(self) -> Metric:
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "requests that wait: for room (capacity), or for their grammar (deferred)",
            labels=(*LABELS, "reason"),
        )
        for labels, stats in label_engines(self._model_name, self._engines):
            num_deferred = min(stats.num_compiling_reqs, stats.num_waiting_reqs)
            waiting.add_metric((*labels, "capacity"), stats.num_waiting_reqs - num_deferred)
            waiting.add_metric((*labels, "deferred"), num_deferred)
        return waiting

    def _cached_by_source(self) -> Metric:
        cached = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "prompt tokens from the prefix cache, by the location of the cache",
            labels=(*LABELS, "source"),
        )
        for labels, totals in label_engines(self._model_name, self._totals):
            cached.add_metric((*labels, _DEVICE), totals.num_cached_prompt_tokens)
            for source in _OTHER_SOURCES:
                cached.add_metric((*labels, source), 0)
        return cached
