"""A request without a socket reaches the application whole, and so does the answer."""

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from paxkv.server.batch.in_process_client import post_json


def post(app, body=b"{}"):
    return asyncio.run(post_json(app, "/v1/x", body, request_id="name"))


def test_request_and_answer_are_whole():
    async def app(scope, receive, send):
        request = Request(scope, receive)
        seen = [request.method, request.url.path, request.headers["content-type"]]
        seen += [request.headers["x-request-id"], await request.json()]
        parts = [json.dumps(seen)[:5], json.dumps(seen)[5:]]
        await StreamingResponse(iter(parts), status_code=418)(scope, receive, send)

    answer = post(app, b'{"a": 1}')
    assert answer.status == 418
    assert json.loads(answer.body) == ["POST", "/v1/x", "application/json", "name", {"a": 1}]


def test_application_that_fails_without_an_answer_is_an_error():
    async def app(scope, receive, send):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        post(app)
