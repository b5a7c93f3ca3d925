"""One page of metrics for all replicas."""

from prometheus_client.parser import text_string_to_metric_families

from paxkv.ray.replica_metrics import merge_metrics
from paxkv.server.metrics.server_metrics import ServerMetrics
from tests.paxkv.server.fake_engine import FakeEngine


def page_of_a_replica() -> str:
    engine = FakeEngine()
    metrics = ServerMetrics(engine.model_info.served_model_name, max_model_len=8, cache_settings={})
    return metrics.render(engine.latest_stats, engine.token_totals).decode()


def samples(page: str, without: str | None = None) -> set[tuple]:
    return {
        (
            family.type,
            sample.name,
            *sorted((k, v) for k, v in sample.labels.items() if k != without),
            sample.value,
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_each_sample_of_each_replica_is_kept_with_a_label() -> None:
    page = page_of_a_replica()
    body, content_type = merge_metrics({"a": page, "b": page}, "")
    merged = body.decode()
    assert content_type.startswith("text/plain")
    assert samples(merged, without="replica") == samples(page) != set()
    for replica in "ab":
        assert merged.count(f'replica="{replica}"') == len(samples(page))
    # A family must not appear twice.
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
