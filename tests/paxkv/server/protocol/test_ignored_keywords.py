"""Responses name the schema keywords that their grammar leaves out, whole and streamed."""

import pytest

from paxkv.server.protocol.ignored_keywords import (
    IGNORED_KEYWORDS_HEADER,
    IgnoredKeywords,
)

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
TOOL = {"name": "f", "parameters": SCHEMA}
NAMED = {"type": "json_schema", "name": "n", "schema": SCHEMA}
BODIES = {
    "/v1/completions": {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
    },
    "/v1/responses": {"input": "a", "text": {"format": NAMED}, "max_output_tokens": 4},
    "/v1/messages": {
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_header_names_the_keywords(shared_server, path, stream):
    limit = {} if path == "/v1/responses" else {"max_tokens": 4}
    response = shared_server.client.post(path, json=BODIES[path] | limit | {"stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED_KEYWORDS_HEADER] == "#/properties/a/uniqueItems"


def test_without_ignored_keywords_there_is_no_header(shared_server):
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": "{}"}}
    response = shared_server.client.post("/v1/completions", json=body)
    assert response.status_code == 200 and IGNORED_KEYWORDS_HEADER not in response.headers
    assert IgnoredKeywords().headers() == {}


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
