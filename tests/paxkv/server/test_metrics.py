"""Metrics of the engine, as Prometheus reads them."""

from prometheus_client.parser import text_string_to_metric_families

from paxkv.contracts.block_residency import (
    RESIDENCY_BUCKETS_S,
    BlockResidency,
    ResidencyHistogram,
)
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.server.metrics import ServerMetrics


def scrape(stats):
    text = ServerMetrics("m").render(stats).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "m" for sample in samples)
    return {(sample.name, sample.labels.get("le")): sample.value for sample in samples}


def test_the_hit_rate_is_that_of_the_recent_requests():
    samples = scrape(
        SchedulerStats(
            prefix_cache_queries=1000,
            prefix_cache_hits=0,
            prefix_cache_recent_queries=40,
            prefix_cache_recent_hits=10,
            prefix_cache_preempted_queries=7,
            prefix_cache_preempted_hits=5,
        )
    )
    assert samples["paxkv_prefix_cache_hit_rate", None] == 0.25
    assert samples["vllm:prefix_cache_queries_total", None] == 1000
    assert samples["paxkv_prefix_cache_preempted_queries_total", None] == 7
    assert samples["paxkv_prefix_cache_preempted_hits_total", None] == 5


def test_before_the_first_request_the_hit_rate_is_0():
    assert scrape(SchedulerStats())["paxkv_prefix_cache_hit_rate", None] == 0


def test_block_residency_becomes_histograms_of_seconds():
    counts = [0] * (len(RESIDENCY_BUCKETS_S) + 1)
    counts[RESIDENCY_BUCKETS_S.index(1.0)] = 2  # in (0.5, 1]
    counts[RESIDENCY_BUCKETS_S.index(60.0)] = 3
    counts[-1] = 1
    lifetime = ResidencyHistogram(bucket_counts=tuple(counts), sum_s=5000.5)
    samples = scrape(SchedulerStats(kv_block_residency=BlockResidency(lifetime=lifetime)))
    name = "vllm:kv_block_lifetime_seconds"
    buckets = [samples[f"{name}_bucket", bound] for bound in ("0.5", "1.0", "30.0", "60.0", "+Inf")]
    assert buckets == [0, 2, 2, 5, 6]
    assert samples[f"{name}_count", None] == 6
    assert samples[f"{name}_sum", None] == 5000.5
    for other in ("vllm:kv_block_idle_before_evict_seconds", "vllm:kv_block_reuse_gap_seconds"):
        assert samples[f"{other}_count", None] == 0
