"""/v1/responses: whole and streamed the same, in OpenAI's order, through the official client."""

import json

import openai
import pytest

from paxkv.config import ServerConfig
from paxkv.server.routes_responses import ResponsesRoutes
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import MODEL_NAME, SAID, SAY, FakeEngine

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
ANSWER = (
    '<think>hm</think>so: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module")
def server():
    config = ServerConfig(
        port=0,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with run_server(FakeEngine(), config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def _items(response):
    """What the items of an answer say, without their ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments, item.status))
        else:
            found.append((item.type, [part.text for part in item.content], item.status))
    return found


def test_answers_only_posts():
    (route,) = ResponsesRoutes(None, None, ServerConfig()).routes()
    assert (route.path, route.methods) == ("/v1/responses", {"POST"})


def test_thoughts_text_and_calls_are_items(client):
    response = client.responses.create(
        model=MODEL_NAME, input=SAY + ANSWER + SAID, tools=[TOOL], max_output_tokens=300
    )
    assert (response.status, response.output_text) == ("completed", "so: ")
    assert _items(response) == [
        ("reasoning", ["hm"], "completed"),
        ("message", ["so: "], "completed"),
        ("f", '{"a": 1}', "completed"),
        ("g", "{}", "completed"),
    ]
    assert response.usage.output_tokens == len(ANSWER)
    assert response.usage.total_tokens == response.usage.input_tokens + len(ANSWER)
    assert response.store is False


def test_a_stream_tells_the_same_in_openais_order(client):
    fields = {
        "model": MODEL_NAME,
        "input": SAY + ANSWER + SAID,
        "tools": [TOOL],
        "max_output_tokens": 300,
    }
    whole = client.responses.create(**fields)
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    order = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    part = ["output_item.added", "content_part.added"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert order == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    assert _items(events[-1].response) == _items(whole)
    assert events[-1].response.usage == whole.usage
    assert events[0].response.output == []
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    assert texts == {0: "hm", 1: "so: ", 2: '{"a": 1}', 3: "{}"}
    # Every event about an item names the item that was begun at its place.
    ids = {e.output_index: e.item.id for e in events if e.type == "response.output_item.added"}
    assert all(e.item_id == ids[e.output_index] for e in events if hasattr(e, "item_id"))


def test_an_answer_that_was_cut_off_is_incomplete(client):
    for stream in (False, True):
        answer = client.responses.create(
            model=MODEL_NAME, input="hi", max_output_tokens=4, stream=stream
        )
        response = list(answer)[-1].response if stream else answer
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert len(response.output_text) == 4


def test_a_conversation_with_calls_comes_to_the_template(server, client):
    client.responses.create(
        model=MODEL_NAME,
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "h"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "message", "role": "user", "content": "so?"},
        ],
        max_output_tokens=2,
    )
    prompt = server.engine.seen_prompts[-1]["prompt"]
    assert prompt == "<system>be brief<user>go<assistant><tool>done<user>so?<assistant>"


def test_the_form_of_a_text_is_a_grammar(server, client):
    schema = {"type": "object", "properties": {}}
    client.responses.create(
        model=MODEL_NAME,
        input=SAY + "{}" + SAID,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
    )
    assert json.loads(server.engine.seen_params[-1].structured_outputs.json) == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "max_output_tokens": 0}, "max_completion_tokens"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "response_format"),
        ({"input": "a", "reasoning": {"effort": "vast"}}, "reasoning_effort"),
    ],
)
def test_bad_field_is_400_and_named(server, fields, param):
    response = server.client.post("/v1/responses", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
