"""Counts of tokens as Prometheus metrics, which are made at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paxkv.contracts.request_output import TOKEN_BUCKETS_S, TokenTotals
from paxkv.server.metrics.engine_metrics import LABELS, label_engines, make_histogram

# Name without `_total`, field of TokenTotals, help.
_COUNTERS = (
    (
        "vllm:prompt_tokens",
        "num_prompt_tokens",
        "prompt tokens of requests that have produced their first token",
    ),
    (
        "vllm:prompt_tokens_cached",
        "num_cached_prompt_tokens",
        "prompt tokens that came from the prefix cache",
    ),
    (
        "vllm:prompt_tokens_recomputed",
        "num_recomputed_prompt_tokens",
        "last tokens of prompts whose other tokens were all in the prefix cache",
    ),
    ("vllm:generation_tokens", "num_generation_tokens", "tokens generated"),
)
# Label `source`, field.
_PROMPT_SOURCES = (
    ("local_compute", "num_computed_prompt_tokens"),
    ("local_cache_hit", "num_cached_prompt_tokens"),
)


class TokenCollector(Collector):
    """Makes metrics of the latest totals."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._engines: tuple[TokenTotals, ...] = (TokenTotals(),)

    def update(self, totals: TokenTotals) -> None:
        self._engines = totals.engines or (totals,)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that the registry does not collect metrics to learn their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        engines = label_engines(self._model_name, self._engines)
        for name, field, help_text in _COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for labels, totals in engines:
                counter.add_metric(labels, getattr(totals, field))
            yield counter
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "prompt tokens, computed or from the prefix cache",
            labels=(*LABELS, "source"),
        )
        for labels, totals in engines:
            for source, field in _PROMPT_SOURCES:
                by_source.add_metric((*labels, source), getattr(totals, field))
        yield by_source
        yield make_histogram(
            "vllm:inter_token_latency_seconds",
            "time between two tokens of a completion",
            TOKEN_BUCKETS_S,
            [
                (labels, totals.token_latency_counts, totals.token_latency_sum_s)
                for labels, totals in engines
            ],
        )
