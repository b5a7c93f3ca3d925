"""Metrics for routers and newer dashboards have vLLM's names, labels and meaning."""

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import TokenTotals
from paxkv.server.metrics.router_metrics import RouterCollector


def scrape(stats=None, totals=None):
    """Metric name -> {labels: value}."""
    registry, collector = CollectorRegistry(), RouterCollector("m")
    registry.register(collector)
    collector.update(stats or SchedulerStats(), totals or TokenTotals())
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def labels(engine, **more):
    return tuple(sorted({"model_name": "m", "engine": engine, **more}.items()))


def test_reasons_of_waiting_add_up_to_those_that_wait():
    one = SchedulerStats(num_waiting_reqs=5, num_compiling_reqs=2)
    both = SchedulerStats(engines=(one, SchedulerStats(num_waiting_reqs=1)))
    assert scrape(both)["vllm:num_requests_waiting_by_reason"] == {
        labels("0", reason="capacity"): 3,
        labels("0", reason="deferred"): 2,
        labels("1", reason="capacity"): 1,
        labels("1", reason="deferred"): 0,
    }


def test_cached_tokens_come_from_the_device():
    found = scrape(totals=TokenTotals(num_prompt_tokens=9, num_cached_prompt_tokens=4))
    by_source = {
        dict(of)["source"]: value
        for of, value in found["vllm:prompt_tokens_cached_by_source_total"].items()
    }
    assert by_source == {"device": 4, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}


def test_there_are_no_adapters_yet():
    ((of, value),) = scrape()["vllm:lora_requests_info"].items()
    assert dict(of) == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert abs(value - time.time()) < 60
