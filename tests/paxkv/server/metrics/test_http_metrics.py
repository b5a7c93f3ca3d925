"""Requests are counted by route, and no client can make series of its own."""

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from paxkv.server.metrics.http_metrics import HttpMetrics, HttpMetricsMiddleware
from tests.paxkv.server.fake_engine import FAIL_AFTER_3


def _samples(text):
    """(name, labels) -> value, of HTTP's own metrics."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("http_") and not sample.name.endswith("_created")
    }


def _scrape(server):
    # A connection of its own: after a bug, the server closes the one that it was on.
    return _samples(httpx.get(f"{server.url}/metrics", timeout=60).text)


def test_a_request_is_counted_by_route_method_and_class_of_status(start_server):
    server = start_server()
    body = {"prompt": "a", "max_tokens": 3}
    whole = server.client.post("/v1/completions", json=body)
    streamed = server.client.post("/v1/completions", json=body | {"stream": True})
    server.client.post("/v1/completions", json={})
    server.client.post("/v1/completions", json={"prompt": FAIL_AFTER_3})
    found = _scrape(server)
    route = "/v1/completions"
    assert found["http_requests_total", route, "2xx", "POST"] == 2
    assert found["http_requests_total", route, "4xx", "POST"] == 1
    assert found["http_requests_total", route, "5xx", "POST"] == 1
    assert found["http_request_duration_seconds_count", route, "POST"] == 4
    assert found["http_request_duration_seconds_bucket", "+Inf", route, "POST"] == 4
    assert found["http_request_duration_highr_seconds_count",] == 4
    sent = [r.request.content for r in (whole, streamed)]
    assert found["http_request_size_bytes_sum", route] > sum(map(len, sent))
    assert found["http_response_size_bytes_sum", route] > len(whole.content) + len(streamed.content)
    assert found["http_response_size_bytes_count", route] == 4


def test_neither_paths_nor_methods_of_clients_become_labels(start_server):
    server = start_server()
    for name in ("one", "two", "a%2Fb"):
        server.client.get(f"/v1/responses/resp_{name}")
        server.client.get(f"/nothing/{name}")
        server.client.request("BREW" + name[:1].upper(), "/v1/completions")
    found = {key: value for key, value in _scrape(server).items() if "requests_total" in key[0]}
    assert found == {
        ("http_requests_total", "/v1/responses/{response_id}", "4xx", "GET"): 2,
        ("http_requests_total", "4xx", "GET", "none"): 4,
        ("http_requests_total", "/v1/completions", "4xx", "other"): 3,
    }


def test_health_checks_are_not_counted(start_server):
    server = start_server()
    for path in ("/health", "/ping", "/load", "/version", "/metrics"):
        assert server.client.get(path).status_code == 200
    assert not any(key[0] == "http_requests_total" for key in _scrape(server))


@pytest.mark.parametrize("error", [RuntimeError, None])
def test_an_answer_that_never_began_is_counted_too(error):
    async def app(scope, receive, send):
        await receive()
        if error is not None:
            raise error

    async def receive():
        return {"type": "http.request", "body": b"abc"}

    registry = CollectorRegistry()
    middleware = HttpMetricsMiddleware(app, metrics=HttpMetrics(registry))
    scope = {"type": "http", "method": "GET", "path": "/", "app": Starlette()}
    running = middleware(scope, receive, None)
    if error is None:
        # Its client has left.
        with pytest.raises(StopIteration):
            running.send(None)
    else:
        with pytest.raises(error):
            running.send(None)
    found = _samples(generate_latest(registry).decode())
    status = "4xx" if error is None else "5xx"
    assert found["http_requests_total", status, "GET", "none"] == 1
    assert found["http_request_size_bytes_sum", "none"] == 3
