"""The document describes all routes; requests that it allows never get a 500."""

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.app import create_app
from paxkv.server.routes.openapi import openapi_document
from tests.paxkv.server.fake_engine import FakeEngine


def _refs(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _refs(inner)


@pytest.mark.parametrize("is_disabled", [False, True])
def test_document_may_be_turned_off(is_disabled):
    app = create_app(FakeEngine(), ServerConfig(disable_fastapi_docs=is_disabled))
    assert ("/openapi.json" in {route.path for route in app.routes}) != is_disabled


def test_every_path_is_a_route_with_that_method():
    app = create_app(FakeEngine(), ServerConfig())
    routes = {}
    for route in app.routes:
        routes.setdefault(route.path.replace(":path", ""), set()).update(route.methods)
    for path, operations in openapi_document()["paths"].items():
        assert {method.upper() for method in operations} <= routes[path], path


def test_every_reference_leads_somewhere():
    document = openapi_document()
    names = {ref.removeprefix("#/components/schemas/") for ref in _refs(document)}
    assert names and names <= set(document["components"]["schemas"])


def test_the_document_is_served_and_knows_the_fields(shared_server):
    document = shared_server.client.get("/openapi.json").json()
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "tools", "logit_bias", "structured_outputs"} <= set(fields)


# This takes minutes. Run it with `pytest -m slow tests/paxkv/server/routes/test_openapi.py`.
@pytest.mark.slow
def test_schemathesis_finds_no_server_error(shared_server):
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")
    num_cases = 0
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        @hypothesis.settings(
            max_examples=500,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=strategy)
        def check(case):
            nonlocal num_cases
            num_cases += 1
            assert case.call().status_code < 500

        check()
    assert num_cases > 1000
