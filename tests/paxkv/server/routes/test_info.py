"""Models, health, version, tokens, and metrics under vLLM's names."""

import dataclasses
import re

import pytest

import paxkv
from paxkv.errors import EngineStalledError
from paxkv.server.routes.info import InfoRoutes
from tests.paxkv.server.fake_engine import MODEL_NAME


def _values(text):
    """Prometheus text -> {'name{labels}': value}."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_every_promised_route_exists():
    paths = {route.path for route in InfoRoutes(None, None, None).routes()}
    assert {"/v1/models", "/health", "/metrics", "/version"} <= paths


def test_models_lists_the_one_model(shared_server):
    body = shared_server.client.get("/v1/models").json()
    card = {
        "id": MODEL_NAME,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "paxkv",
        "root": "/models/fake",
        "parent": None,
        "max_model_len": 512,
        "features": {"bursts": {"active": False, "detail": "it has none."}},
    }
    assert body == {"object": "list", "data": [card]}
    assert shared_server.client.get(f"/v1/models/{MODEL_NAME}").json() == card
    assert shared_server.client.get("/v1/models/other").status_code == 404
    assert shared_server.client.get("/v1/models/").json() == body


@pytest.mark.parametrize("name", ["org/other", MODEL_NAME])
def test_a_model_has_several_names_and_answers_with_the_first(start_server, name):
    server = start_server()
    info = dataclasses.replace(server.engine.model_info, other_model_names=("org/other",))
    server.engine.model_info = info
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [MODEL_NAME, "org/other"]
    assert server.client.get(f"/v1/models/{name}").json()["id"] == name
    for path, fields in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        response = server.client.post(path, json=fields | {"model": name})
        assert response.status_code == 200
        assert response.json().get("model", MODEL_NAME) == MODEL_NAME
    response = server.client.post("/tokenize", json={"prompt": "a", "model": "third"})
    assert "'org/other'" in response.json()["error"]["message"]


def test_version_and_health(shared_server):
    assert shared_server.client.get("/version").json() == {"version": paxkv.__version__}
    response = shared_server.client.get("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_health_says_why_the_engine_makes_no_progress(start_server):
    server = start_server()
    server.engine.stall = EngineStalledError("3 unfinished requests, and no step has completed")
    for path in ("/health", "/ping"):
        response = server.client.get(path)
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("engine_stalled", "server_error")
        assert error["message"] == "3 unfinished requests, and no step has completed"
    # The requests go on as soon as a step completes.
    server.engine.stall = None
    assert server.client.get("/health").status_code == 200


def test_metrics_count_what_was_served(start_server):
    server = start_server()
    body = {"prompt": [1, 2, 3], "max_tokens": 5}
    server.client.post("/v1/completions", json=body)
    server.client.post("/v1/completions", json=body | {"stream": True})
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = _values(response.text)
    label = f'{{engine="0",model_name="{MODEL_NAME}"}}'
    assert values[f"vllm:prompt_tokens_total{label}"] == 6
    assert values[f"vllm:generation_tokens_total{label}"] == 10
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:num_requests_waiting{label}"] == 0
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0.25
    assert values[f"vllm:prefix_cache_queries_total{label}"] == 100
    assert values[f"vllm:prefix_cache_hits_total{label}"] == 40
    assert values[f"vllm:num_preemptions_total{label}"] == 3
    assert values[f"paxkv_compiles_after_ready_total{label}"] == 0
    finished = f'{{engine="0",finished_reason="length",model_name="{MODEL_NAME}"}}'
    assert values[f"vllm:request_success_total{finished}"] == 2
    assert values[f"vllm:e2e_request_latency_seconds_count{label}"] == 2
    # Only the stream shows when its first token came; this engine tells nothing of the other.
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] == 1
    assert values[f"vllm:inter_token_latency_seconds_count{label}"] == 8


def test_openmetrics_is_returned_to_clients_that_accept_it(shared_server):
    headers = [("Accept", "text/html"), ("Accept", "application/openmetrics-text")]
    response = shared_server.client.get("/metrics", headers=headers)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_metrics_names_are_well_formed(shared_server):
    for name in _values(shared_server.client.get("/metrics").text):
        ours = (
            r"(vllm:|paxkv:)[a-z0-9_]+\{|(paxkv_compiles_after_ready_total|padding_waste_ratio)\{"
        )
        assert re.match(rf"{ours}|(process|python|http)_[a-z_]+", name)


def test_a_slash_after_the_name_of_a_model_is_ignored(start_server):
    server = start_server()
    assert server.client.get(f"/v1/models/{MODEL_NAME}/").json()["id"] == MODEL_NAME
    # Some models are named after their folder.
    name = "/of/models//a/"
    info = dataclasses.replace(server.engine.model_info, served_model_name=name)
    server.engine.model_info = info
    assert server.client.get(f"/v1/models/{name}").json()["id"] == name
    assert server.client.get("/v1/models/a/").status_code == 404
