"""Metrics of the engine, as Prometheus reads them."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paxkv.contracts.engine_output import STEP_TOKEN_BUCKETS, SchedulerStats
from paxkv.contracts.observation import RESIDENCY_BUCKETS_S, BlockResidency, ResidencyHistogram
from paxkv.fleet.stats_sum import sum_stats
from paxkv.server.metrics.engine_metrics import EngineCollector


def scrape(*stats):
    """The last of several scrapes."""
    registry, collector = CollectorRegistry(), EngineCollector("m")
    registry.register(collector)
    for each in stats:
        collector.update(each)
        text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "m" for sample in samples)
    assert all(sample.labels["engine"] == "0" for sample in samples)
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
    assert samples["paxkv:prefix_cache_hit_rate", None] == 0.25
    assert samples["vllm:prefix_cache_queries_total", None] == 1000
    assert samples["paxkv:prefix_cache_preempted_queries_total", None] == 7
    assert samples["paxkv:prefix_cache_preempted_hits_total", None] == 5


def test_shares_are_zero_before_the_first_request():
    samples = scrape(SchedulerStats())
    for name in ("prefix_cache_hit_rate", "padding_waste_ratio", "kv_waste_ratio"):
        assert samples[f"paxkv:{name}", None] == 0


def test_waste_is_reported_as_a_share():
    samples = scrape(
        SchedulerStats(
            num_scheduled_tokens=30,
            num_padded_tokens=10,
            num_allocated_slots=64,
            num_used_slots=48,
            num_compiles_after_ready=2,
            num_corrupted_reqs=4,
        )
    )
    assert samples["padding_waste_ratio", None] == 0.25
    assert samples["vllm:corrupted_requests_total", None] == 4
    assert samples["paxkv:padding_waste_ratio", None] == 0.25
    assert samples["paxkv:kv_waste_ratio", None] == 0.25
    assert samples["paxkv_compiles_after_ready_total", None] == 2
    assert samples["paxkv:compiles_after_ready_total", None] == 2


def test_steps_are_a_histogram_of_their_tokens():
    counts = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
    counts[0], counts[3], counts[-1] = 5, 2, 1
    samples = scrape(SchedulerStats(step_token_counts=tuple(counts), num_scheduled_tokens=20_045))
    name = "vllm:iteration_tokens_total"
    buckets = [samples[f"{name}_bucket", le] for le in ("1.0", "16.0", "32.0", "16384.0", "+Inf")]
    assert buckets == [5, 5, 7, 7, 8]
    assert (samples[f"{name}_count", None], samples[f"{name}_sum", None]) == (8, 20_045)


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


def test_counters_continue_after_the_previous_engine():
    first = SchedulerStats(engine_start_time=1.0, num_preemptions=5, num_running_reqs=7)
    second = SchedulerStats(engine_start_time=2.0, num_preemptions=2, num_running_reqs=1)
    samples = scrape(first, second)
    assert samples["vllm:num_preemptions_total", None] == 7
    assert samples["vllm:num_requests_running", None] == 1
    assert samples["paxkv:engine_restarts_total", None] == 1


def test_each_of_several_engines_has_its_own_number():
    first = SchedulerStats(
        num_running_reqs=3,
        kv_cache_usage=0.5,
        num_preemptions=4,
        num_scheduled_tokens=6,
        step_token_counts=(2, *[0] * len(STEP_TOKEN_BUCKETS)),
    )
    second = SchedulerStats(
        num_waiting_reqs=2, num_preemptions=1, num_replaced_engines=1, engine_start_time=9.0
    )
    together = sum_stats([first, second])
    registry, collector = CollectorRegistry(), EngineCollector("m")
    registry.register(collector)
    collector.update(msgspec.structs.replace(together, engines=(first, second)))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    # The parser takes a name that comes twice for two families.
    assert len({family.name for family in families}) == len(families)
    found = {
        name: [s.value for family in families for s in family.samples if s.name == name]
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total",
            "vllm:iteration_tokens_total_sum",
            "vllm:kv_block_lifetime_seconds_count",
            "paxkv:engine_restarts_total",
            "paxkv:engine_start_time_seconds",
        )
    }
    assert list(found.values()) == [
        [3, 0],
        [0, 2],
        [0.5, 0],
        [4, 1],
        [6, 0],
        [0, 0],
        [0, 1],
        [0, 9],
    ]
    assert all(
        {sample.labels["engine"] for sample in family.samples} == {"0", "1"} for family in families
    )


def test_experts_have_series_once_they_are_counted():
    def scrape_experts(*engines):
        registry, collector = CollectorRegistry(), EngineCollector("m")
        registry.register(collector)
        collector.update(msgspec.structs.replace(sum_stats(engines), engines=engines))
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if line.startswith("paxkv:expert_tokens")]

    counting = SchedulerStats(expert_tokens={0: (7, 0), 3: (2, 5)})
    labels = 'expert="{}",layer="{}",model_name="m"'
    assert scrape_experts(SchedulerStats(), counting) == [
        f'paxkv:expert_tokens_total{{engine="1",{labels.format(expert, layer)}}} {count}.0'
        for layer, expert, count in ((0, 0, 7), (0, 1, 0), (3, 0, 2), (3, 1, 5))
    ]
    assert scrape_experts(SchedulerStats(), SchedulerStats()) == []


def test_accepted_drafts_have_series_by_position_with_a_drafter():
    def scrape_positions(*engines):
        registry, collector = CollectorRegistry(), EngineCollector("m")
        registry.register(collector)
        collector.update(msgspec.structs.replace(sum_stats(engines), engines=engines))
        lines = generate_latest(registry).decode().splitlines()
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return [line for line in lines if line.startswith(name)]

    assert scrape_positions(SchedulerStats(), SchedulerStats()) == []
    found = scrape_positions(SchedulerStats(), SchedulerStats(num_accepted_per_pos=(7, 2)))
    assert [line.rpartition("{")[2] for line in found] == [
        f'engine="1",model_name="m",position="{position}"}} {count}.0'
        for position, count in enumerate((7, 2))
    ]
