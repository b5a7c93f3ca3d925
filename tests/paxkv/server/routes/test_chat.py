"""/v1/chat/completions: messages, streams, log-probabilities, the official client."""

import asyncio
import dataclasses
import json

import openai
import pytest

from paxkv.config.chat_template_kwargs import ChatTemplateKwargs
from paxkv.config.server_config import ServerConfig
from paxkv.server.routes.chat import ChatRoutes
from paxkv.text.chat_template import ChatTemplate
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import (
    MODEL_NAME,
    SAID,
    SAY,
    FakeEngine,
    FakeTokenizer,
    answer_token_ids,
)

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
PROMPT = "<system>be brief<user>hi<assistant>"


def _answer(prompt, max_tokens, *, index=0):
    # The template has written its special tokens: no BOS in front.
    token_ids = FakeTokenizer().encode(prompt, add_special_tokens=False)
    return "".join(map(chr, answer_token_ids(token_ids, max_tokens, index=index)))


def _post(server, **fields):
    response = server.client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8} | fields
    )
    assert response.status_code == 200, response.text
    return response.json()


def _stream(server, **fields):
    body = {"messages": MESSAGES, "max_tokens": 8, "stream": True} | fields
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_only_posts():
    (route,) = ChatRoutes(None, None, None).routes()
    assert (route.path, route.methods) == ("/v1/chat/completions", {"POST"})


def test_answer_has_openai_form(shared_server):
    body = _post(shared_server, request_id="mine")
    assert body["id"] == "chatcmpl-mine"
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": _answer(PROMPT, 8),
        "refusal": None,
    }
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("length", 0, None)
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_engine_that_saves_states_gets_the_length_of_the_leading_messages(start_server):
    server = start_server()
    _post(server)
    assert "num_leading_chars" not in server.engine.seen_prompts[-1]
    server.engine.model_info = dataclasses.replace(server.engine.model_info, saves_states=True)
    _post(server)
    assert server.engine.seen_prompts[-1]["num_leading_chars"] == len("<system>be brief<user>")


def test_stream_begins_with_the_role_and_says_the_same_as_the_whole(shared_server):
    whole = _post(shared_server)
    *chunks, last = _stream(shared_server, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    text = "".join(delta["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True}], ids=["drawn", "searched"])
def test_n_answers_are_n_choices_whole_and_streamed(shared_server, fields):
    whole = _post(shared_server, n=3, **fields)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert contents == [_answer(PROMPT, 8, index=index) for index in range(3)]
    assert whole["usage"]["prompt_tokens"] == len(PROMPT)
    assert whole["usage"]["completion_tokens"] == 8 + 7 + 6
    *chunks, last = _stream(shared_server, n=3, stream_options={"include_usage": True}, **fields)
    assert last["usage"] == whole["usage"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, content in enumerate(contents):
        first, *parts = [choice for choice in choices if choice["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"]["content"] for part in parts) == content
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["length"]


def test_beam_search_shows_logprobs_only_when_asked(shared_server):
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 1}
    assert _post(shared_server, **fields)["choices"][0]["logprobs"] is None
    answer = _post(shared_server, logprobs=True, top_logprobs=3, **fields)
    (position,) = answer["choices"][0]["logprobs"]["content"]
    assert len(position["top_logprobs"]) == 3


def test_max_completion_tokens_wins_and_the_default_is_the_rest_of_the_context(shared_server):
    assert _post(shared_server, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    body = _post(shared_server, max_tokens=None)
    assert body["usage"]["total_tokens"] == 512  # the fake's max_model_len


def test_absent_fields_have_the_models_defaults(start_server):
    server = start_server()
    server.engine.set_sampling_defaults(temperature=0.5, top_k=3, limit=4)
    for fields in ({"max_tokens": 2}, {"temperature": 0.9, "top_k": 0, "max_tokens": 99}):
        body = {"messages": [{"role": "user", "content": "hi"}]} | fields
        assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    left_out, given = server.engine.seen_params
    assert (left_out.temperature, left_out.top_k, left_out.max_tokens) == (0.5, 3, 2)
    assert (given.temperature, given.top_k, given.max_tokens) == (0.9, 0, 4)


def test_a_search_without_a_length_leaves_it_to_the_models_default(start_server):
    server = start_server()
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 400
    server.engine.set_sampling_defaults(max_new_tokens=4)
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("top_logprobs", [None, 0, 1, 3])
def test_logprobs_hold_as_many_alternatives_as_asked(shared_server, top_logprobs):
    fields = {"logprobs": True, "top_logprobs": top_logprobs, "max_tokens": 2}
    (choice,) = _post(shared_server, **fields)["choices"]
    text = choice["message"]["content"]
    content = choice["logprobs"]["content"]
    assert [position["token"] for position in content] == list(text)
    assert content[0]["bytes"] == [ord(text[0])]
    assert content[0]["logprob"] == -1.0
    # The fake ranks "A" first, the drawn token second, "C" third.
    tops = [top["token"] for top in content[0]["top_logprobs"]]
    assert tops == ["A", text[0], "C"][: top_logprobs or 0]
    chunks = _stream(shared_server, **fields)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[1:]]
    assert [p for part in parts for p in part["content"]] == content


def test_text_parts_are_joined_and_template_arguments_arrive(shared_server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = _post(
        shared_server,
        messages=[{"role": "user", "content": parts}],
        chat_template_kwargs={"tail": "<tail>"},
        add_generation_prompt=False,
    )
    assert body["choices"][0]["message"]["content"] == _answer("<user>a\nb<tail>", 8)


def test_special_tokens_are_added_only_if_requested(shared_server):
    body = _post(shared_server, add_special_tokens=True)
    assert body["usage"]["prompt_tokens"] == len(PROMPT) + 1
    body = _post(shared_server, add_special_tokens=None)
    assert body["usage"]["prompt_tokens"] == len(PROMPT)


def test_model_without_template_is_a_clear_error(start_server):
    server = start_server()
    server.engine.chat_template = None
    response = server.client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    # A template would not help here.
    server.engine.tokenizer = None
    response = server.client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "without a tokenizer" in message and "--chat-template" not in message


def test_openai_async_client_chats_and_streams(shared_server):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{shared_server.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(
                model=MODEL_NAME,
                messages=MESSAGES,
                max_completion_tokens=8,
                logprobs=True,
                top_logprobs=2,
            )
            stream = await client.chat.completions.create(
                model=MODEL_NAME,
                messages=MESSAGES,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk())
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text == _answer(PROMPT, 8)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"


def _said(text):
    return [{"role": "user", "content": SAY + text + SAID}]


def _joined_stream(chunks):
    """What the deltas of a stream with one choice add up to."""
    message = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append([call["function"]["name"], ""])
                message["tool_calls"][call["index"]][1] += call["function"].get("arguments", "")
    return message, chunks[-1]["choices"][0]["finish_reason"]


@pytest.fixture(scope="module")
def tool_server():
    with run_server(
        FakeEngine(),
        ServerConfig(
            port=0,
            max_body_bytes=100_000,
            enable_auto_tool_choice=True,
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
            trust_request_chat_template=True,
        ),
    ) as server:
        yield server


def test_calls_and_reasoning_are_separated_whole_and_streamed(tool_server):
    text = (
        '<think>hm</think>so: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    fields = {"messages": _said(text), "tools": [TOOL], "max_tokens": 200}
    (choice,) = _post(tool_server, **fields)["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("so: ", "hm")
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]]
    assert calls == [["f", '{"a": 1}'], ["g", "{}"]]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    joined, reason = _joined_stream(_stream(tool_server, **fields))
    assert joined["tool_calls"] == calls and reason == "tool_calls"
    assert (joined["content"], joined["reasoning"]) == ("so: ", "hm")
    assert joined["reasoning_content"] == message["reasoning_content"] == "hm"
    # The template was shown the tools.
    assert "<tool>f" in tool_server.engine.seen_prompts[-1]["prompt"]


def test_only_one_call_is_returned_without_parallel_calls(tool_server):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    fields = {"messages": _said(text), "tools": [TOOL], "max_tokens": 200}
    (choice,) = _post(tool_server, parallel_tool_calls=False, **fields)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    joined, _ = _joined_stream(_stream(tool_server, parallel_tool_calls=False, **fields))
    assert len(joined["tool_calls"]) == 1


def test_a_call_that_was_cut_off_ends_by_length(tool_server):
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    fields = {"messages": _said(text), "tools": [TOOL], "max_tokens": 42}
    (choice,) = _post(tool_server, **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a"'
    assert choice["finish_reason"] == "length"


def test_thoughts_can_be_left_out(tool_server):
    fields = {"messages": _said("<think>hm</think>so"), "max_tokens": 50}
    (choice,) = _post(tool_server, include_reasoning=False, **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "so", "refusal": None}


@pytest.mark.parametrize(
    ("text", "max_tokens", "num_thought_tokens"),
    [
        ("<think>hm</think>so", 50, len("<think>hm</think>")),
        # Cut off while it thinks, and without a thought.
        ("<think>hm</think>so", 9, 9),
        ("so", 50, 0),
    ],
)
def test_tokens_of_thoughts_are_counted_whole_and_streamed(
    tool_server, text, max_tokens, num_thought_tokens
):
    fields = {"messages": _said(text), "max_tokens": max_tokens, "n": 3}
    usage = _post(tool_server, **fields)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 * num_thought_tokens}
    options = {"include_usage": True, "continuous_usage_stats": True}
    # Hidden thoughts count as completion tokens too.
    chunks = _stream(tool_server, stream_options=options, include_reasoning=False, **fields)
    assert chunks[-1]["usage"] == usage
    so_far = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks]
    assert so_far[0] == 0 and so_far == sorted(so_far)


def test_without_a_reasoning_parser_no_reasoning_tokens_are_counted(shared_server):
    body = _post(shared_server, messages=_said("<think>hm</think>so"), max_tokens=50)
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize(
    ("tool_choice", "said", "reason"),
    [
        ("required", '[{"name": "f", "parameters": {"a": 1}}]', "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, '{"a": 1}', "stop"),
    ],
)
def test_a_forced_call_is_a_grammar_and_is_returned_as_a_call(
    shared_server, tool_choice, said, reason
):
    fields = {"messages": _said(said), "tools": [TOOL], "tool_choice": tool_choice}
    (choice,) = _post(shared_server, max_tokens=99, **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] is None and choice["finish_reason"] == reason
    joined, streamed_reason = _joined_stream(_stream(shared_server, max_tokens=99, **fields))
    assert joined["tool_calls"] == [["f", '{"a": 1}']] and streamed_reason == reason
    schema = json.loads(shared_server.engine.seen_params[-1].structured_outputs.json)
    assert schema["type"] == ("array" if tool_choice == "required" else "object")


def test_tool_choice_none_shows_the_tools_and_parses_no_call(tool_server):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    fields = {"messages": _said(text), "tools": [TOOL], "tool_choice": "none", "max_tokens": 99}
    (choice,) = _post(tool_server, **fields)["choices"]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert "<tool>f" in tool_server.engine.seen_prompts[-1]["prompt"]


def test_token_ids_and_usage_come_with_every_chunk_when_asked(shared_server):
    fields = {"return_token_ids": True, "n": 2}
    whole = _post(shared_server, **fields)
    assert whole["prompt_token_ids"] == list(map(ord, PROMPT))
    chunks = _stream(
        shared_server,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **fields,
    )
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        streamed = [i for part in parts for i in part.get("token_ids", ())]
        assert streamed == choice["token_ids"]
        assert "".join(map(chr, streamed)) == choice["message"]["content"]
    # A chunk counts the tokens sent up to it, of all choices.
    num_sent = 0
    for chunk in chunks:
        num_sent += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == num_sent
    assert num_sent == 8 + 7


def test_the_prompts_text_is_returned_if_requested(shared_server):
    assert _post(shared_server, return_prompt_text=True)["prompt_text"] == PROMPT
    assert "prompt_text" not in _post(shared_server)
    first, *rest = _stream(shared_server, return_prompt_text=True)
    assert first["prompt_text"] == PROMPT
    assert not any("prompt_text" in chunk for chunk in rest)


def test_a_server_may_count_the_tokens_of_every_stream(start_server):
    server = start_server(enable_force_include_usage=True)
    for options in (None, {"include_usage": False}):
        *chunks, last = _stream(server, stream_options=options)
        assert last["usage"]["completion_tokens"] == 8 and last["choices"] == []
        assert {chunk["usage"] for chunk in chunks} == {None}
    first, *_ = _stream(server, stream_options={"continuous_usage_stats": True})
    assert first["usage"]["completion_tokens"] == 0
    body = {"prompt": "a", "stream": True, "max_tokens": 2}
    text = server.client.post("/v1/completions", json=body).text
    assert '"completion_tokens":2' in text
    assert "usage" in _post(server)


def test_events_have_the_requested_number_of_tokens(shared_server):
    chunks = _stream(shared_server, stream_interval=3, return_token_ids=True)
    sizes = [len(c["choices"][0].get("token_ids", ())) for c in chunks]
    # The chunk with the role has none.
    assert sizes == [0, 1, 3, 3, 1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == _answer(PROMPT, 8)


def test_server_sets_interval_and_template_arguments_that_requests_may_change(start_server):
    server = start_server(
        stream_interval=100,
        default_chat_template_kwargs=ChatTemplateKwargs({"tail": "<t>", "other": 1}),
    )
    assert len(_stream(server)) == 3
    assert len(_stream(server, stream_interval=1)) == 9
    assert server.engine.seen_prompts[-1]["prompt"] == PROMPT.replace("<a", "<t><a")
    _post(server, chat_template_kwargs={"tail": "<u>"})
    assert server.engine.seen_prompts[-1]["prompt"] == PROMPT.replace("<a", "<u><a")
    body = server.client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert "".join(map(chr, body["tokens"])) == PROMPT.replace("<a", "<t><a")


def test_token_ids_of_text_that_is_held_back_are_sent(tool_server):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    fields = {"messages": _said(text), "tools": [TOOL], "max_tokens": 99, "return_token_ids": True}
    (choice,) = _post(tool_server, **fields)["choices"]
    chunks = _stream(tool_server, **fields)
    streamed = [i for c in chunks for i in c["choices"][0].get("token_ids", ())]
    assert streamed == choice["token_ids"] and len(streamed) == len(text)


def test_tokens_can_be_shown_as_their_ids(shared_server):
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = _post(shared_server, max_tokens=1, return_token_ids=True, **fields)["choices"]
    (position,) = choice["logprobs"]["content"]
    assert position["token"] == f"token_id:{choice['token_ids'][0]}"
    assert position["top_logprobs"][0]["token"] == "token_id:65"


@pytest.mark.parametrize("content", ["well, ", [{"type": "refusal", "refusal": "well, "}]])
def test_the_last_message_is_continued_and_echoed(shared_server, content):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    body = _post(shared_server, echo=True, **fields)
    answer = _answer("<user>hi<assistant>well, ", 8)
    assert body["choices"][0]["message"]["content"] == "well, " + answer
    joined, _ = _joined_stream(_stream(shared_server, echo=True, **fields))
    assert joined["content"] == "well, " + answer


def test_a_trusted_request_may_have_its_own_template(tool_server):
    fields = {"chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    body = _post(tool_server, **fields)
    assert body["choices"][0]["message"]["content"] == _answer("[be brief][hi]", 8)
    response = tool_server.client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "chat_template": "{% for %}"}
    )
    assert response.status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_broken_template_of_the_model_is_the_servers_error(start_server, tmp_path, caplog, path):
    server = start_server()
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    server.engine.chat_template = ChatTemplate.from_folder(tmp_path)
    fields = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES}
    response = server.client.post(path, json=fields)
    error = response.json()["error"]
    assert response.status_code == 500
    assert (error["type"], error["code"]) == ("server_error", "chat_template_error")
    assert "(chat_template.jinja, line 1) cannot be compiled" in error["message"]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert server.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("tail", "has_tokens", "thoughts"),
    [
        ("", True, "maybe"),
        ("<think>\n", True, "begun"),
        ("<think>\n\n</think>\n", True, "none"),
        ("", False, "none"),
    ],
)
def test_the_grammar_starts_after_the_reasoning(start_server, tail, has_tokens, thoughts):
    server = start_server(reasoning_parser="qwen3")
    if has_tokens:
        server.engine.tokenizer.named_ids = {"<think>": 298, "</think>": 299}
    said = {"maybe": "<think>hm</think>7", "begun": "hm</think>7", "none": "7"}[thoughts]
    fields = {
        "messages": _said(said),
        "chat_template_kwargs": {"tail": tail},
        "add_generation_prompt": False,
        "max_tokens": 50,
        "structured_outputs": {"regex": "[0-9]"},
    }
    (choice,) = _post(server, **fields)["choices"]
    assert server.engine.seen_params[-1].structured_outputs.thoughts == thoughts
    expected = ("7", "" if thoughts == "none" else "hm")
    message = choice["message"]
    assert (message["content"], message.get("reasoning") or "") == expected
    joined, _ = _joined_stream(_stream(server, **fields))
    assert (joined["content"], joined["reasoning"]) == expected
    # A completion has no thoughts.
    body = {
        "model": MODEL_NAME,
        "prompt": "a",
        "max_tokens": 1,
        "structured_outputs": {"regex": "a"},
    }
    assert server.client.post("/v1/completions", json=body).is_success
    assert server.engine.seen_params[-1].structured_outputs.thoughts == "none"
