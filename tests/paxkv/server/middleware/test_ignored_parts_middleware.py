"""An answer names what was ignored of its request, and the log says so once."""

import logging

import pytest

from paxkv.server.middleware.ignored_parts_middleware import IGNORED_HEADER, MAX_LOGGED_NAMES

BODY = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
TOOL = {"name": "f", "parameters": SCHEMA}
NAMED = {"type": "json_schema", "name": "n", "schema": SCHEMA}
BODIES = {
    "/v1/completions": {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
    "/v1/chat/completions": {
        "messages": BODY["messages"],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
    },
    "/v1/responses": {"input": "a", "text": {"format": NAMED}, "max_output_tokens": 4},
    "/v1/messages": {
        "messages": BODY["messages"],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}


def _warnings(caplog):
    return [r.getMessage() for r in caplog.records if "ignores" in r.getMessage()]


def test_ignored_parts_are_named_in_a_header_and_logged_once(start_server, caplog):
    caplog.set_level(logging.WARNING)
    server = start_server()
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = BODY | {"betas": ["new-2030-01-01"], "tools": [search]}
    for stream in (False, True):
        response = server.client.post("/v1/messages/?beta=true", json=body | {"stream": stream})
        assert response.status_code == 200
        assert response.headers[IGNORED_HEADER] == "betas, tools of type web_search_20250305"
    (warning,) = _warnings(caplog)
    assert "betas, tools of type web_search_20250305" in warning
    # Nothing is left for the next request.
    assert IGNORED_HEADER not in server.client.post("/v1/messages", json=BODY).headers


def test_every_route_with_tools_reports_ignored_keywords(start_server):
    server = start_server()
    tools = [{"type": "web_search"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": BODY["messages"], "verbosity": "low"}),
        ("/v1/responses", {"input": "hi", "max_tool_calls": 3}),
        ("/tokenize", {"messages": BODY["messages"]}),
    ):
        response = server.client.post(path, json=fields | {"tools": tools})
        assert response.status_code == 200, response.text
        assert "tools of type web_search" in response.headers[IGNORED_HEADER]


def test_a_long_body_is_read_in_a_thread_and_reports_ignored_fields(start_server):
    server = start_server()
    body = BODY | {"betas": ["x" * 50_000]}
    assert server.client.post("/v1/messages", json=body).headers[IGNORED_HEADER] == "betas"


def test_clients_cannot_fill_the_log(start_server, caplog):
    caplog.set_level(logging.WARNING)
    server = start_server()
    for k in range(MAX_LOGGED_NAMES // 16 + 5):
        tools = [{"type": f"t{k}_{i}"} for i in range(16)]
        assert server.client.post("/v1/messages", json=BODY | {"tools": tools}).status_code == 200
    assert len(_warnings(caplog)) == MAX_LOGGED_NAMES // 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_header_names_the_keywords(shared_server, path, stream):
    limit = {} if path == "/v1/responses" else {"max_tokens": 4}
    response = shared_server.client.post(path, json=BODIES[path] | limit | {"stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED_HEADER] == "#/properties/a/uniqueItems"


def test_one_header_names_ignored_fields_and_then_keywords(shared_server):
    body = BODIES["/v1/messages"] | {"max_tokens": 4, "betas": ["new"]}
    response = shared_server.client.post("/v1/messages", json=body)
    assert response.headers[IGNORED_HEADER] == "betas, #/properties/a/uniqueItems"
    # Nothing is left for the next request.
    body = {"messages": BODY["messages"], "max_tokens": 4}
    assert IGNORED_HEADER not in shared_server.client.post("/v1/messages", json=body).headers


def test_without_ignored_keywords_there_is_no_header(shared_server):
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": "{}"}}
    response = shared_server.client.post("/v1/completions", json=body)
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers


def test_they_are_counted_when_a_request_has_finished(shared_server):
    def count():
        lines = shared_server.client.get("/metrics").text.splitlines()
        name = "paxkv:ignored_schema_keywords_total{"
        (line,) = [x for x in lines if x.startswith(name) and 'keyword="uniqueItems"' in x]
        return float(line.split()[-1])

    before = count()
    path = "/v1/completions"
    shared_server.client.post(path, json=BODIES[path] | {"max_tokens": 4})
    assert count() == before + 1
