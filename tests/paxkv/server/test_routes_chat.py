"""/v1/chat/completions: messages, streams, log-probabilities, the official client."""

import asyncio
import json

import openai
import pytest

from paxkv.server.routes_chat import ChatRoutes
from tests.paxkv.server.fake_engine import MODEL_NAME, FakeTokenizer, answer_token_ids

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
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
    (route,) = ChatRoutes(None, None, max_body_bytes=1).routes()
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


def test_max_completion_tokens_wins_and_without_a_limit_the_context_is_filled(shared_server):
    assert _post(shared_server, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    body = _post(shared_server, max_tokens=None)
    assert body["usage"]["total_tokens"] == 512  # the fake's max_model_len


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


def test_special_tokens_are_added_only_on_request(shared_server):
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
