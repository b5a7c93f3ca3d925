"""/v1/responses: whole and streamed the same, in OpenAI's order, through the official client."""

import dataclasses
import json
import re
import time

import openai
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import UnsupportedFeatureError
from paxkv.server.protocol.responses.request import chat_of_responses, parse_responses
from paxkv.server.routes.responses import ResponsesRoutes
from tests.paxkv.server.conftest import PATIENCE_S, run_server
from tests.paxkv.server.fake_engine import (
    FAIL_AFTER_3,
    MODEL_NAME,
    NO_TOKENS,
    SAID,
    SAY,
    FakeEngine,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "summary": []}
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


def test_every_promised_route_exists():
    routes = ResponsesRoutes(None, None, ServerConfig()).routes()
    assert [(route.path, route.methods - {"HEAD"}) for route in routes] == [
        ("/v1/responses", {"POST"}),
        ("/v1/responses/{response_id}", {"GET", "DELETE"}),
        ("/v1/responses/{response_id}/cancel", {"POST"}),
    ]


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
    details = response.usage.output_tokens_details
    assert details.reasoning_tokens == len("<think>hm</think>")
    assert response.store is True


def test_a_stream_has_the_same_content_in_openais_order(client):
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


def test_a_conversation_with_calls_reaches_the_template(server, client):
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


def _thought(text: str) -> dict[str, object]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def _call(name: str) -> dict[str, object]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def _output(name: str) -> dict[str, object]:
    return {"type": "function_call_output", "call_id": name, "output": name}


def _chat(items: list[object]) -> list[tuple[object, ...]]:
    """The messages of a chat: role, thought, and text or the names of calls."""
    fields = {"input": items}
    return [
        (m["role"], m.get("reasoning"), m["content"] or [c["id"] for c in m.get("tool_calls", [])])
        for m in chat_of_responses(fields, parse_responses(fields)).messages
    ]


def test_reasoning_precedes_the_text_after_it():
    said = {"role": "assistant", "content": "let me see"}
    items = [said, _thought("x"), _call("f"), _call("g"), _thought("y"), _call("h")]
    assert _chat(items) == [
        ("assistant", None, "let me see"),
        ("assistant", "x", ["f", "g"]),
        ("assistant", "y", ["h"]),
    ]


def test_thoughts_are_joined_and_stay_the_assistants():
    user, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    items = [_thought("x"), _thought("y"), said, _thought("cut"), user, _thought("last")]
    assert _chat(items) == [
        ("assistant", "x\ny", "a"),
        ("assistant", "cut", []),
        ("user", None, "u"),
        ("assistant", "last", []),
    ]


@pytest.mark.parametrize("role", [{}, {"role": "assistant"}])
def test_thoughts_between_a_call_and_its_output_are_the_calls(role):
    outputs = [_output(name) | role for name in "fg"]
    called = [_call("f"), _call("g")]
    tools = [("tool", None, name) for name in "fg"]
    assert _chat([*called, _thought("x"), *outputs]) == [("assistant", "x", ["f", "g"]), *tools]
    items = [_thought("v"), *called, _thought("x"), outputs[0], _thought("y"), outputs[1]]
    assert _chat(items) == [("assistant", "v\nx\ny", ["f", "g"]), *tools]
    # The call of this output is missing.
    said = {"role": "assistant", "content": "a"}
    items = [said, _thought("x"), outputs[0]]
    assert _chat(items) == [("assistant", None, "a"), ("assistant", "x", []), tools[0]]


def test_items_of_other_tools_are_left_out():
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    patch = {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "x"}
    patched = {"type": "custom_tool_call_output", "call_id": "p", "output": "done"}
    listed = {"type": "mcp_list_tools", "tools": []}
    said = {"role": "assistant", "content": "a"}
    assert _chat([listed, search, patch, patched, said]) == [("assistant", None, "a")]


def test_thoughts_without_text_are_their_summary():
    summary = [{"type": "summary_text", "text": text} for text in ("s", "", "t")]
    thought = {"type": "reasoning", "content": None, "summary": summary}
    assert _chat([thought, _call("f")]) == [("assistant", "s\nt", ["f"])]
    encrypted = {"encrypted_content": "gAAA", "summary": summary}
    assert _chat([_thought("x") | encrypted, _call("f")]) == [("assistant", "x", ["f"])]
    with pytest.raises(UnsupportedFeatureError, match=r"input\[1\].encrypted_content cannot"):
        _chat([_call("f"), thought | encrypted])


def test_the_format_of_a_text_is_a_grammar(server, client):
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
        ({"input": [{"type": "reasoning", "content": []}]}, "input"),
        ({"input": "a", "previous_response_id": "chat_1"}, "previous_response_id"),
        ({"input": "a", "previous_response_id": 1}, "previous_response_id"),
        ({"input": "a", "background": True, "stream": True}, "background"),
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "tools": [{"type": "web_search", "parameters": {}}]}, "tools"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "a", "truncation": "middle"}, "truncation"),
        ({"input": "a", "previous_input_messages": [{}]}, "previous_input_messages"),
    ],
)
def test_bad_field_is_400_and_named(server, fields, param):
    response = server.client.post("/v1/responses", json=fields)
    assert response.status_code == 400
    # The path of the part that is wrong begins with the field.
    assert re.split(r"[.\[]", response.json()["error"]["param"])[0] == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens must be in"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort must be one of"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type must be one of"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format must be"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            '"function", "name": "...", ',
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, '"name": "..."}, got'),
        ({"instructions": "b", "input": [{"role": "bot", "content": ""}]}, "input[0].role must"),
        ({"input": [CALL | {"call_id": 5}]}, "input[0].call_id must be"),
        (
            {"input": [CALL, {"type": "function_call_output", "output": [{"type": "image"}]}]},
            "input[1].output[0] must be",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content must be a string"),
        ({"input": [CALL, THOUGHT | {"content": "hm"}]}, "input[1].content is 'hm'"),
        ({"input": [THOUGHT | {"content": [{"text": "a"}, "hm"]}]}, "input[0].content[1] is 'hm'"),
        ({"input": [THOUGHT | {"content": [{"text": 5}]}]}, "input[0].content[0] is {"),
        ({"input": [THOUGHT | {"summary": {"text": "hm"}}]}, "input[0].summary is {"),
        (
            {"input": [THOUGHT | {"content": [{"text": "a"}], "summary": 1}]},
            "input[0].summary is 1",
        ),
    ],
)
def test_an_error_uses_the_field_names_of_this_api(server, fields, words):
    error = server.client.post("/v1/responses", json={"input": "a"} | fields).json()["error"]
    assert words in error["message"]
    assert re.split(r"[.\[]", error["param"])[0] in fields


def test_include_and_effort_may_ask_for_more_than_an_answer_can_have(server, client):
    include = ["reasoning.encrypted_content", "file_search_call.results"]
    answer = _create(client, input="a", include=include, reasoning={"effort": "xhigh"})
    assert answer.output_text


def test_long_prompts_are_cut_at_the_start_if_allowed(server, client):
    assert _create(client, input="a", truncation="auto").truncation == "auto"
    assert server.engine.seen_prompts[-1]["truncate_prompt_tokens"] == "auto"
    assert _create(client, input="a").truncation == "disabled"
    assert "truncate_prompt_tokens" not in server.engine.seen_prompts[-1]


def test_a_stop_string_may_be_part_of_the_answer(server, client):
    _create(client, input="a", extra_body={"stop": "b", "include_stop_str_in_output": True})
    assert server.engine.seen_params[-1].include_stop_str_in_output


def _create(client, *, stream=False, **fields):
    fields = {"model": MODEL_NAME, "max_output_tokens": 4} | fields
    answer = client.responses.create(stream=stream, **fields)
    return list(answer)[-1].response if stream else answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_the_previous_one(server, client, stream):
    first = _create(client, stream=stream, input="one", instructions="be brief")
    item = {"type": "function_call_output", "call_id": "c", "output": "two"}
    second = _create(client, stream=stream, input=[item], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = _create(
        client, stream=stream, input="3", previous_response_id=second.id, instructions="be long"
    )
    # Of the instructions only the latest.
    assert server.engine.seen_prompts[-1]["prompt"] == (
        f"<system>be long<user>one<assistant>{first.output_text}<tool>two"
        f"<assistant>{second.output_text}<user>3<assistant>"
    )
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()
    # Another may go on from there too.
    _create(client, stream=stream, input="4", previous_response_id=first.id)
    assert server.engine.seen_prompts[-1]["prompt"].endswith("<user>4<assistant>")


def test_calls_and_reasoning_are_part_of_the_continued_conversation(server, client):
    first = _create(client, input=SAY + ANSWER + SAID, tools=[TOOL], max_output_tokens=300)
    seen = []
    server.engine.chat_template.render, render = (
        lambda messages, **kwargs: seen.append(messages) or "x",
        server.engine.chat_template.render,
    )
    try:
        _create(client, input="go", previous_response_id=first.id)
    finally:
        server.engine.chat_template.render = render
    _, answer, last = seen[0]
    assert (answer["reasoning"], answer["content"]) == ("hm", [{"type": "text", "text": "so: "}])
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["f", "g"]
    assert last == {"role": "user", "content": "go"}


def test_what_is_not_stored_is_a_404_that_says_why(server, client):
    kept_out = _create(client, input="a", store=False)
    assert kept_out.store is False
    with pytest.raises(openai.NotFoundError, match="--response-store-bytes") as raised:
        client.responses.retrieve(kept_out.id)
    assert raised.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as raised:
        _create(client, input="a", previous_response_id=kept_out.id)
    assert raised.value.param == "previous_response_id"
    for path in ("/v1/responses/other", f"/v1/responses/{kept_out.id}?stream=true"):
        assert server.client.get(path).status_code == 400


def test_a_server_without_a_store_says_so(start_server):
    server = start_server(response_store_bytes=0)
    body = {"input": "a", "max_output_tokens": 2}
    assert server.client.post("/v1/responses", json=body).json()["store"] is False
    for field in ({"previous_response_id": "resp_1"}, {"background": True}):
        error = server.client.post("/v1/responses", json=body | field).json()["error"]
        assert error["param"] in field and "--response-store-bytes 0" in error["message"]


def _wait(client, response_id):
    deadline = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(response_id)).status == "queued":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_an_answer_in_the_background_is_there_later(server, client):
    begun = _create(client, input="one", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    found = _wait(client, begun.id)
    assert found.status == "incomplete" and len(found.output_text) == 4
    with pytest.raises(openai.BadRequestError, match="is incomplete"):
        client.responses.cancel(begun.id)
    # What fails says so where it is asked for.
    failed = _wait(client, _create(client, input=FAIL_AFTER_3, background=True).id)
    assert (failed.status, failed.error.code) == ("failed", "internal_error")
    with pytest.raises(openai.BadRequestError, match="is failed"):
        _create(client, input="go on", previous_response_id=failed.id)


def test_an_answer_in_the_background_is_cancelled_in_the_engine(server, client):
    begun = _create(client, input=NO_TOKENS, background=True)
    with pytest.raises(openai.BadRequestError, match="is queued"):
        _create(client, input="go on", previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert server.engine.seen_request_ids[-1] in server.engine.aborted
    assert not server.engine.running


def test_deleting_removes_an_answer_and_ends_one_in_the_background(server, client):
    kept, gone = _create(client, input="one"), _create(client, input="two")
    client.responses.delete(gone.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is not stored: it was deleted, or"):
            call(gone.id)
    with pytest.raises(openai.NotFoundError):
        _create(client, input="go on", previous_response_id=gone.id)
    assert client.responses.retrieve(kept.id).id == kept.id
    answer = server.client.delete(f"/v1/responses/{kept.id}")
    assert answer.json() == {"id": kept.id, "object": "response", "deleted": True}
    # What a path takes is all that it takes.
    answer = server.client.put(f"/v1/responses/{kept.id}")
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    with pytest.raises(openai.BadRequestError, match="must be the id of a response"):
        client.responses.delete("chatcmpl-1")
    running = _create(client, input=NO_TOKENS, background=True)
    client.responses.delete(running.id)
    assert server.engine.seen_request_ids[-1] in server.engine.aborted
    assert not server.engine.running
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)


@pytest.mark.parametrize("name", ["a/b", "a?b#c", "..", "%2F", "é\n"])
def test_an_answer_is_found_by_its_id_whatever_name_its_request_had(client, name):
    response = _create(client, input="a", extra_body={"request_id": name})
    assert client.responses.retrieve(response.id).id == response.id


def test_a_full_server_refuses_answers_in_the_background(start_server):
    server = start_server(max_waiting_requests=0)
    server.engine.model_info = dataclasses.replace(server.engine.model_info, max_num_seqs=1)
    body = {"input": NO_TOKENS, "background": True}
    begun = server.client.post("/v1/responses", json=body).json()
    refused = server.client.post("/v1/responses", json=body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    server.client.post(f"/v1/responses/{begun['id']}/cancel")


def test_absent_fields_have_the_models_defaults_which_the_answer_names(start_server):
    server = start_server()
    server.engine.set_sampling_defaults(temperature=0.5, top_p=0.75, top_k=3, limit=4)
    asked = {"input": "hi", "max_output_tokens": 2}
    left_out = server.client.post("/v1/responses", json=asked).json()
    assert (left_out["temperature"], left_out["top_p"]) == (0.5, 0.75)
    asked = {"input": "hi", "temperature": 0.9, "top_p": 1, "top_k": 0, "max_output_tokens": 99}
    given = server.client.post("/v1/responses", json=asked).json()
    assert (given["temperature"], given["top_p"]) == (0.9, 1)
    open_ended = server.client.post("/v1/responses", json={"input": "hi"}).json()
    answers = (left_out, given, open_ended)
    assert [answer["max_output_tokens"] for answer in answers] == [2, 4, None]
    seen = [(p.temperature, p.top_p, p.top_k, p.max_tokens) for p in server.engine.seen_params]
    assert seen == [(0.5, 0.75, 3, 2), (0.9, 1, 0, 4), (0.5, 0.75, 3, None)]
