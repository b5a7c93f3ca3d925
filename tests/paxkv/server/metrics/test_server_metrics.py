"""What passes through the server is counted under vLLM's names, labels and buckets."""

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import (
    CompletionOutput,
    CompletionTimes,
    RequestOutput,
    TokenTotals,
)
from paxkv.errors import EngineDeadError, InvalidRequestError
from paxkv.server.metrics.server_metrics import ServerMetrics, build_1_2_5_buckets

TIMES = CompletionTimes(queue_s=0.4, prefill_s=0.9, decode_s=3.0, first_token_s=1.4)
# What dashboards and routers made for vLLM ask for.
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
)
COUNTERS = (
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_recomputed_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "corrupted_requests_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def scrape(metrics, stats=None, totals=None):
    """(name, labels) -> value, without the labels that all metrics have."""
    text = metrics.render(stats or SchedulerStats(), totals or TokenTotals()).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            without_labels = ("vllm:cache_config_info", "vllm:lora_requests_info")
            if sample.name.startswith("vllm:") and sample.name not in without_labels:
                assert labels.pop("model_name") == "m"
                assert labels.pop("engine") == "0"
            samples[sample.name, *labels.values()] = sample.value
    return samples


def _output(*completions, num_cached_tokens=2):
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * 10,
        outputs=list(completions),
        finished=all(c.finished for c in completions),
        num_cached_tokens=num_cached_tokens,
    )


def _completion(num_tokens, reason="length", *, index=0, times=TIMES):
    return CompletionOutput(
        index=index, text="", token_ids=[5] * num_tokens, finish_reason=reason, times=times
    )


def test_every_name_is_there_from_the_start():
    samples = scrape(ServerMetrics("m"))
    for name in HISTOGRAMS:
        assert samples[f"vllm:{name}_count",] == samples[f"vllm:{name}_sum",] == 0
        assert samples[f"vllm:{name}_bucket", "+Inf"] == 0
    for name in COUNTERS + GAUGES:
        assert samples[f"vllm:{name}",] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert samples["vllm:request_success_total", reason] == 0
    assert samples["process_resident_memory_bytes",] > 1e6


def test_finished_request_is_counted_with_its_times():
    metrics = ServerMetrics("m")
    params = SamplingParams(max_tokens=7, n=2, temperature=1.0)
    with metrics.start_request(is_stream=False, params=params) as timer:
        timer.observe(_output(_completion(7), _completion(4, "stop", index=1)))
    samples = scrape(metrics)
    assert samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:request_success_total", "stop"] == 1
    sums = {name: samples[f"vllm:{name}_sum",] for name in HISTOGRAMS}
    assert sums["request_queue_time_seconds"] == 0.8
    assert sums["request_prefill_time_seconds"] == 1.8
    assert sums["request_decode_time_seconds"] == 6.0
    assert sums["request_inference_time_seconds"] == 7.8
    assert sums["request_time_per_output_token_seconds"] == 3.0 / 6 + 3.0 / 3
    assert sums["time_to_first_token_seconds"] == 1.4
    assert sums["request_prompt_tokens"] == 10
    assert sums["request_prefill_kv_computed_tokens"] == 8
    assert sums["request_generation_tokens"] == 11
    assert sums["request_max_num_generation_tokens"] == 7
    assert (sums["request_params_n"], sums["request_params_max_tokens"]) == (2, 7)
    # 0.4 s of queue, twice, lie between vLLM's bounds of 0.3 and 0.5.
    name = "vllm:request_queue_time_seconds_bucket"
    assert [samples[name, le] for le in ("0.3", "0.5", "7680.0")] == [0, 2, 2]


def test_preemptions_of_completions_are_counted_in_vllms_buckets():
    metrics = ServerMetrics("m")
    for num_preemptions in (0, 1, 4):
        with metrics.start_request(is_stream=False) as timer:
            completion = dataclasses.replace(_completion(7), num_preemptions=num_preemptions)
            timer.observe(_output(completion))
    samples = scrape(metrics)
    name = "vllm:request_num_preemptions"
    assert (samples[f"{name}_count",], samples[f"{name}_sum",]) == (3, 5)
    bounds = ("1.0", "2.0", "3.0", "4.0", "5.0", "10.0", "20.0", "+Inf")
    assert [samples[f"{name}_bucket", bound] for bound in bounds] == [2, 2, 2, 3, 3, 3, 3, 3]


def test_stream_shows_its_first_token_when_it_comes():
    metrics = ServerMetrics("m")
    with metrics.start_request(is_stream=True, params=SamplingParams()) as timer:
        timer.observe(_output(_completion(1, None, times=None)))
        assert scrape(metrics)["vllm:time_to_first_token_seconds_count",] == 1
        timer.observe(_output(_completion(3, None, times=None)))
        timer.observe(_output(_completion(2)))
    samples = scrape(metrics)
    assert samples["vllm:time_to_first_token_seconds_count",] == 1
    assert samples["vllm:request_generation_tokens_sum",] == 6


def test_token_counts_come_from_the_engines_client():
    metrics = ServerMetrics("m")
    # 2 tokens within 0.01 s, 3 within 0.05 s, 1 later than the last bound.
    counts = (2, 0, 3, *[0] * 16, 1)
    totals = TokenTotals(
        num_prompt_tokens=10,
        num_cached_prompt_tokens=2,
        num_recomputed_prompt_tokens=1,
        num_generation_tokens=11,
        token_latency_counts=counts,
        token_latency_sum_s=90.5,
    )
    samples = scrape(metrics, totals=totals)
    assert samples["vllm:prompt_tokens_total",] == 10
    assert samples["vllm:prompt_tokens_cached_total",] == 2
    assert samples["vllm:prompt_tokens_recomputed_total",] == 1
    assert samples["vllm:prompt_tokens_by_source_total", "local_compute"] == 8
    assert samples["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 2
    assert samples["vllm:generation_tokens_total",] == 11
    name = "vllm:inter_token_latency_seconds"
    buckets = [samples[f"{name}_bucket", le] for le in ("0.01", "0.025", "0.05", "80.0", "+Inf")]
    assert buckets == [2, 2, 5, 5, 6]
    assert (samples[f"{name}_count",], samples[f"{name}_sum",]) == (6, 90.5)


def test_tokens_of_several_engines_are_counted_for_each():
    engines = (
        TokenTotals(num_prompt_tokens=10, num_cached_prompt_tokens=2, num_generation_tokens=7),
        TokenTotals(num_generation_tokens=4, token_latency_counts=(4, *[0] * 19)),
    )
    totals = TokenTotals(num_generation_tokens=11, engines=engines)
    text = ServerMetrics("m").render(SchedulerStats(), totals).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("source") or sample.labels.get("le"))
            found.setdefault(key, {})[sample.labels.get("engine")] = sample.value
    assert found["vllm:generation_tokens_total", None] == {"0": 7, "1": 4}
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == {"0": 8, "1": 0}
    assert found["vllm:inter_token_latency_seconds_bucket", "0.01"] == {"0": 0, "1": 4}
    # Requests are measured here, for all engines together.
    assert found["vllm:e2e_request_latency_seconds_count", None] == {"0": 0}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(GeneratorExit(), "abort"), (EngineDeadError("died"), "error"), (RuntimeError(), "error")],
)
def test_request_that_does_not_end_counts_once_a_completion(error, reason):
    metrics = ServerMetrics("m")
    params = SamplingParams(n=3, temperature=1.0)
    with pytest.raises(type(error)), metrics.start_request(is_stream=True, params=params) as timer:
        timer.observe(_output(_completion(1, "stop"), _completion(1, None, index=1, times=None)))
        raise error
    samples = scrape(metrics)
    assert samples["vllm:request_success_total", reason] == 2
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_params_n_count",] == 0


def test_an_aborted_beam_search_counts_each_of_its_sequences():
    metrics = ServerMetrics("m")
    params = BeamSearchParams(beam_width=3, max_tokens=3)
    with pytest.raises(GeneratorExit), metrics.start_request(is_stream=False, params=params):
        raise GeneratorExit
    assert scrape(metrics)["vllm:request_success_total", "abort"] == 3


def test_refused_calls_are_not_counted_as_requests():
    metrics = ServerMetrics("m")
    with pytest.raises(InvalidRequestError), metrics.start_request(is_stream=True):
        raise InvalidRequestError("no")
    samples = scrape(metrics)
    assert not any(v for k, v in samples.items() if k[0] == "vllm:request_success_total")


def test_beam_search_counts_its_sequences():
    metrics = ServerMetrics("m")
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with metrics.start_request(is_stream=False, params=params) as timer:
        timer.observe(_output(_completion(3, times=None), _completion(3, index=1, times=None)))
    samples = scrape(metrics)
    assert samples["vllm:request_params_n_sum",] == 2
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:request_queue_time_seconds_count",] == 0


def test_cache_settings_are_labels():
    # Block size, engine, blocks.
    metrics = ServerMetrics("m", cache_settings={"block_size": "64", "num_gpu_blocks": "100"})
    assert scrape(metrics)["vllm:cache_config_info", "64", "0", "100"] == 1


def test_token_buckets_end_at_the_models_length():
    assert build_1_2_5_buckets(300) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert build_1_2_5_buckets(1) == [1]
    samples = scrape(ServerMetrics("m", max_model_len=20))
    bounds = [k[1] for k in samples if k[0] == "vllm:request_prompt_tokens_bucket"]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
