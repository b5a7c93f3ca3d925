"""Combines the metrics of several replicas into one page for Prometheus."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from paxkv.server.metrics.metrics_format import choose_format


def merge_metrics(pages: Mapping[str, str], accept: str) -> tuple[bytes, str]:
    """Merges pages in Prometheus' text format; returns the page and its content type.

    Args:
        pages: Replica id -> its page. Each sample gets the id as the label `replica`.
        accept: The client's header.
    """
    families: dict[str, Metric] = {}
    for replica_id, page in pages.items():
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = sample.labels | {"replica": replica_id}
                merged.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    encode, content_type = choose_format(accept)
    return encode(registry), content_type


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
