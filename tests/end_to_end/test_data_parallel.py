"""Two engines that share the requests answer as one does.

The tests of the fleet and of `build_client` run two engines without a device in the normal suite.
"""

import json
import os
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paxkv import LLM, SamplingParams
from paxkv.errors import ConfigError
from tests.end_to_end.real_server import running_server
from tests.small_engine import FLAGS, SETTINGS

VOCAB_SIZE = 768
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=12, min_tokens=4),
)


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(1, VOCAB_SIZE, 20).tolist()
    return [shared + rng.integers(1, VOCAB_SIZE, n).tolist() for n in (3, 20, 9, 1, 30, 2)]


def answers(**settings) -> list[list[list[int]]]:
    prompts = make_prompts()
    with LLM(**SETTINGS, **settings) as llm:
        outputs = [
            output for params in PARAMS for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        assert llm.get_stats().num_compiles_after_ready == 0
        assert llm.get_stats().num_running_reqs == 0
        engines = llm.get_stats().engines
        assert len(engines) == settings.get("data_parallel_size", 0)
        assert all(engine.num_scheduled_tokens > 0 for engine in engines)
        assert llm.model_info.max_num_seqs == settings.get("data_parallel_size", 1)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


NEEDS_TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="each engine needs a core"
)


@pytest.fixture(scope="module")
def server():
    """A server with two engines, each of which runs one request at a time."""
    with running_server(*FLAGS, "--data-parallel-size", "2") as server:
        yield server


def complete(server, prompts, **fields):
    body = {"model": "paxkv-demo", "prompt": prompts, "return_token_ids": True} | fields
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return [choice["token_ids"] for choice in json.load(response)["choices"]]


@pytest.mark.slow
@NEEDS_TWO_CORES
def test_metrics_count_the_tokens_of_each_engine(server) -> None:
    def read() -> dict[str, dict[str, float]]:
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: dict[str, dict[str, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            found.setdefault(sample.name, {})[sample.labels.get("engine")] = sample.value
        return found

    before = read()
    complete(server, [[5, 6, 7], [8, 9]], max_tokens=4, ignore_eos=True)
    after = read()

    def growth(name: str) -> dict[str, float]:
        old = before.get(name, {})
        return {engine: value - old.get(engine, 0) for engine, value in after[name].items()}

    assert growth("vllm:generation_tokens_total") == {"0": 4, "1": 4}
    assert growth("vllm:prefix_cache_queries_total") == {"0": 3, "1": 2}
    assert after["vllm:num_requests_running"] == {"0": 0, "1": 0}
    assert after["vllm:e2e_request_latency_seconds_count"].keys() == {"0"}
    assert growth("vllm:e2e_request_latency_seconds_count") == {"0": 2}


@pytest.mark.slow
@NEEDS_TWO_CORES
def test_server_with_two_engines_answers_as_one_engine(server, demo_llm: LLM) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True}
    asked = [
        fields | {"temperature": 0.0},
        fields | {"temperature": 1.0, "n": 2, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 12, "min_tokens": 4},
    ]
    prompts = make_prompts()
    wanted = [
        [
            completion.token_ids
            for output in demo_llm.generate(prompts, SamplingParams(**a), use_tqdm=False)
            for completion in output.outputs
        ]
        for a in asked
    ]
    assert [complete(server, prompts, **a) for a in asked] == wanted


@pytest.mark.slow
@NEEDS_TWO_CORES
def test_tokens_are_the_same_as_with_one_engine() -> None:
    assert answers(data_parallel_size=2) == answers()


def test_more_engines_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=10000 is more than"):
        LLM(**SETTINGS, data_parallel_size=10_000)
    with pytest.raises(ConfigError, match="at least 1"):
        LLM(**SETTINGS, data_parallel_size=0)
