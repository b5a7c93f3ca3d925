"""/v1/messages: whole and streamed the same, in Anthropic's order and with its errors."""

import dataclasses
import json

import httpx
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.routes.messages import MessagesRoutes
from tests.paxkv.server.conftest import HELD_S, run_server, wait_until
from tests.paxkv.server.fake_engine import (
    DIE_AFTER_3,
    FAIL_AFTER_3,
    GRAMMAR_FAILS,
    MODEL_NAME,
    NO_TOKENS,
    NUM_CACHED_TOKENS,
    SAID,
    SAY,
    FakeEngine,
)

TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f'<think>hm</think>so: {CALL}<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>'
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2025-01-01"}


@pytest.fixture(scope="module")
def server():
    config = ServerConfig(
        port=0,
        max_body_bytes=100_000,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with run_server(FakeEngine(), config) as running:
        yield running


def _body(said, **fields):
    message = {"role": "user", "content": SAY + said + SAID}
    return {"model": MODEL_NAME, "max_tokens": 300, "messages": [message]} | fields


def _post(server, body, path="/v1/messages"):
    return server.client.post(path, json=body, headers=HEADERS)


def _answer(server, body):
    response = _post(server, body)
    assert response.status_code == 200, response.text
    return response.json()


def _stream(server, body):
    """The data of each event; the name of an event must be the type of its data."""
    events = []
    response = _post(server, body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith(
        "text/event-stream"
    )
    for text in response.text.strip().split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def _order(events):
    """Types of events without repetitions."""
    types = [event["type"] for event in events]
    return [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]


def _content(message):
    return [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]


def _error(response):
    """Type and message of an error, whose form is checked."""
    body = response.json()
    assert body["type"] == "error" and set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]["type"], body["error"]["message"]


def test_every_promised_route_exists():
    routes = MessagesRoutes(None, None, ServerConfig()).routes()
    assert [(route.path, route.methods) for route in routes] == [
        ("/v1/messages", {"POST"}),
        ("/v1/messages/count_tokens", {"POST"}),
    ]


def test_thoughts_text_and_calls_are_blocks(server):
    response = _post(server, _body(ANSWER, tools=[TOOL]))
    answer = response.json()
    assert _content(answer) == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "so: "},
        {"type": "tool_use", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "name": "g", "input": {}},
    ]
    assert len({block["id"] for block in answer["content"][2:]}) == 2
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["model"] == MODEL_NAME
    assert answer["id"] == f"msg_{response.headers['request-id']}"
    usage = answer["usage"]
    assert usage["output_tokens"] == len(ANSWER)
    assert usage["output_tokens_details"] == {"thinking_tokens": len("<think>hm</think>")}
    assert usage["cache_read_input_tokens"] == NUM_CACHED_TOKENS
    assert usage["cache_creation_input_tokens"] == 0


def test_a_stream_has_the_same_content_in_anthropics_order(server):
    body = _body(ANSWER, tools=[TOOL])
    whole, events = _answer(server, body), _stream(server, body)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert _order(events) == [
        "message_start",
        *("content_block_start", "ping", "content_block_delta", "content_block_stop"),
        *block * 3,
        *("message_delta", "message_stop"),
    ]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert start["usage"]["output_tokens"] == 0
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    texts = {0: "", 1: "", 2: "", 3: ""}
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            delta = event["delta"]
            texts[event["index"]] += delta[
                {"thinking_delta": "thinking", "text_delta": "text"}.get(
                    delta["type"], "partial_json"
                )
            ]
    assert texts == {0: "hm", 1: "so: ", 2: '{"a": 1}', 3: "{}"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "end_turn"), ({"max_tokens": 3}, "max_tokens")],
)
def test_the_end_has_its_reason(server, fields, reason):
    body = _body("hello", **fields)
    assert _answer(server, body)["stop_reason"] == reason
    assert _stream(server, body)[-2]["delta"]["stop_reason"] == reason


def test_a_stop_sequence_is_named_if_it_is_the_clients(start_server, monkeypatch):
    server = start_server()
    generate = server.engine.generate

    async def stopped_at_x(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            ends = [
                dataclasses.replace(c, finish_reason="stop", stop_reason="x") if c.finished else c
                for c in output.outputs
            ]
            yield dataclasses.replace(output, outputs=ends)

    monkeypatch.setattr(server.engine, "generate", stopped_at_x)
    body = _body("hello", stop_sequences=["y", "x"])
    assert _stream(server, body)[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "x",
    }
    answer = _answer(server, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "x")
    assert server.engine.seen_params[-1].stop_strings == ("y", "x")
    answer = _answer(server, _body("hello"))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_an_answer_without_text_has_no_block(server):
    body = _body("<think></think>")
    assert _answer(server, body)["content"] == []
    assert _order(_stream(server, body)) == ["message_start", "message_delta", "message_stop"]


def test_thoughts_may_be_left_out(server):
    body = _body(ANSWER, tools=[TOOL], thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in _answer(server, body)["content"]] == [
        "text",
        "tool_use",
        "tool_use",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_a_loop(server, stream):
    """The client sends answers back, with a result for each call, until an answer has no call."""
    tools, messages = [TOOL], [{"role": "user", "content": "add" + SAY + CALL * 2 + SAID}]
    for turn in range(2):
        body = _body("", tools=tools, messages=messages)
        if stream:
            events = _stream(server, body)
            content = [e["content_block"] for e in events if e["type"] == "content_block_start"]
            reason = events[-2]["delta"]["stop_reason"]
        else:
            answer = _answer(server, body)
            content, reason = answer["content"], answer["stop_reason"]
        if turn == 1:
            break
        assert (reason, len(content)) == ("tool_use", 2)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"r{k}"}
            for k, block in enumerate(content)
        ]
        messages = [
            # What the fake engine would say again is not part of the second turn.
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": [*results, {"type": "text", "text": SAY + "2" + SAID}]},
        ]
    assert reason == "end_turn"
    assert server.engine.seen_prompts[-1]["prompt"] == (
        f"<tool>f<user>add<assistant><tool>r0<tool>r1<user>{SAY}2{SAID}<assistant>"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "any"}, '[{"name": "f", "parameters": {"a": 2}}]'),
        ({"type": "tool", "name": "f"}, '{"a": 2}'),
    ],
)
def test_a_forced_call_is_a_tool_use(server, choice, said, stream):
    body = _body(said, tools=[TOOL], tool_choice=choice)
    if stream:
        events = _stream(server, body)
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [block["name"] for block in starts] == ["f"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        answer = _answer(server, body)
        assert _content(answer) == [{"type": "tool_use", "name": "f", "input": {"a": 2}}]
        assert answer["stop_reason"] == "tool_use"
    assert server.engine.seen_params[-1].structured_outputs.json is not None


def test_an_answer_continues_the_assistants_last_message(server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is ("}]
    _answer(server, _body("", messages=messages, system="be brief", max_tokens=2))
    assert server.engine.seen_prompts[-1]["prompt"] == "<system>be brief<user>hi<assistant>it is ("


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [{"type": "text", "text": "be brief"}], "tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [{"role": "assistant", "content": "it is ("}]},
    ],
)
def test_a_count_is_the_length_of_the_prompt(server, fields):
    body = _body("hi", **fields)
    usage = _answer(server, body)["usage"]
    num_seen = len(server.engine.seen_prompts)
    del body["max_tokens"]
    counted = _post(server, body, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    # Nothing was generated.
    assert len(server.engine.seen_prompts) == num_seen


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_anthropics_form(server, path):
    good = _body("hi")
    assert _error(_post(server, good | {"messages": []}, path)) == (
        "invalid_request_error",
        "messages must not be empty.",
    )
    unknown = _post(server, good | {"model": "claude"}, path)
    assert unknown.status_code == 404
    kind, message = _error(unknown)
    assert kind == "not_found_error" and repr(MODEL_NAME) in message
    not_json = server.client.post(path, content=b"{")
    assert (not_json.status_code, _error(not_json)[0]) == (415, "invalid_request_error")
    large = server.client.post(path, json=good | {"system": "a" * 100_001})
    assert (large.status_code, _error(large)[0]) == (413, "request_too_large")
    assert server.client.get(path).status_code == 405
    assert _error(server.client.get(path))[0] == "invalid_request_error"


def test_an_unknown_path_below_the_root_path_is_404(server):
    response = server.client.post("/v1/messages/batches", json={})
    assert response.status_code == 404
    assert _error(response) == ("not_found_error", "there is nothing at /v1/messages/batches.")
    # The other routes keep OpenAI's form.
    assert "param" in server.client.post("/v1/messages_", json={}).json()["error"]


def test_a_refused_field_is_named(server):
    kind, message = _error(_post(server, _body("hi", inference_geo="us")))
    assert kind == "invalid_request_error" and message.startswith("inference_geo is not supported")
    kind, message = _error(_post(server, _body("hi", stop_sequences=["a"] * 100)))
    assert kind == "invalid_request_error" and message.startswith("stop_sequences may hold at most")
    kind, message = _error(_post(server, _body("hi", max_tokens=0)))
    assert "max_tokens must be in" in message


def test_a_server_without_a_tool_parser_says_what_it_needs(start_server):
    server = start_server()
    kind, message = _error(_post(server, _body("hi", tools=[TOOL])))
    assert kind == "invalid_request_error" and "--enable-auto-tool-choice" in message


def test_headers_that_are_too_large_have_anthropics_form(start_server):
    server = start_server(max_header_bytes=2_000)
    response = server.client.post("/v1/messages", json={}, headers={"x-long": "a" * 1_900})
    assert (response.status_code, _error(response)[0]) == (431, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_server_is_529(start_server, stream):
    server = start_server(max_waiting_requests=0)
    server.engine.model_info = dataclasses.replace(server.engine.model_info, max_num_seqs=1)
    messages = [{"role": "user", "content": NO_TOKENS}]
    waiting = {"input": NO_TOKENS, "background": True}
    begun = server.client.post("/v1/responses", json=waiting).json()
    refused = _post(server, _body("", messages=messages, stream=stream))
    assert (refused.status_code, refused.headers["Retry-After"]) == (529, "1")
    assert _error(refused)[0] == "overloaded_error"
    server.client.post(f"/v1/responses/{begun['id']}/cancel")


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [(FAIL_AFTER_3, 500, "api_error"), (DIE_AFTER_3, 503, "api_error")],
)
def test_a_failure_of_the_server_is_reported_whole_and_streamed(start_server, text, status, kind):
    server = start_server()
    body = _body("", messages=[{"role": "user", "content": text}], max_tokens=9)
    response = _post(server, body)
    assert (response.status_code, _error(response)[0]) == (status, kind)
    assert "secret" not in response.text
    server.engine.is_alive = True
    events = _stream(server, body)
    assert _order(events)[-2:] == ["content_block_delta", "error"]
    assert set(events[-1]) == {"type", "error", "request_id"}
    assert events[-1]["error"]["type"] == kind


def test_a_grammar_that_fails_is_the_requests_mistake(server):
    body = _body("", messages=[{"role": "user", "content": GRAMMAR_FAILS}])
    response = _post(server, body)
    kind, message = _error(response)
    assert (response.status_code, kind) == (400, "invalid_request_error")
    assert "the grammar cannot go on" in message


def test_a_bug_before_the_answer_is_an_api_error(start_server, monkeypatch, caplog):
    server = start_server()

    def fail(*args, **kwargs):
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(server.engine.chat_template, "render", fail)
    response = _post(server, _body("hi"))
    assert (response.status_code, _error(response)[0]) == (500, "api_error")
    assert "secret" not in response.text and "a secret of the inside" in caplog.text


def test_a_client_that_disconnects_aborts_the_request(start_server):
    server = start_server(seconds_per_token=HELD_S)
    body = _body("", messages=[{"role": "user", "content": "long"}], max_tokens=400, stream=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/messages", json=body, timeout=0.5)
    wait_until(lambda: server.engine.seen_request_ids and not server.engine.running)
