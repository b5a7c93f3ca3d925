"""/v1/completions: forms of prompts, streams, token counts, log-probabilities."""

import concurrent.futures
import dataclasses
import json

import openai
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.routes.completions import CompletionRoutes
from tests.paxkv.server.conftest import HELD_S
from tests.paxkv.server.fake_engine import BOS, MODEL_NAME, answer_token_ids


def _answer(prompt_token_ids, max_tokens, *, index=0):
    return "".join(map(chr, answer_token_ids(prompt_token_ids, max_tokens, index=index)))


def _events(response):
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answers_only_posts():
    (route,) = CompletionRoutes(None, None, ServerConfig()).routes()
    assert (route.path, route.methods) == ("/v1/completions", {"POST"})


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [5]], [[BOS, 97], [5]]),
    ],
)
def test_every_form_of_prompt_gets_its_choice(shared_server, prompt, token_ids):
    response = shared_server.client.post("/v1/completions", json={"prompt": prompt}).json()
    assert [choice["index"] for choice in response["choices"]] == list(range(len(token_ids)))
    assert [c["text"] for c in response["choices"]] == [_answer(ids, 16) for ids in token_ids]
    assert {c["finish_reason"] for c in response["choices"]} == {"length"}
    num_prompt, num_new = sum(map(len, token_ids)), 16 * len(token_ids)
    assert response["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": 2 * len(token_ids)},
    }
    assert response["object"] == "text_completion"
    assert response["model"] == MODEL_NAME


@pytest.mark.parametrize("prompt", ["once upon", ["a", "bc", "def"], [[1], [2, 3]]])
def test_stream_says_the_same_as_the_whole(shared_server, prompt):
    body = {"prompt": prompt, "max_tokens": 40, "logprobs": 2}
    whole = shared_server.client.post("/v1/completions", json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with shared_server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = _events(response)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["length"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in part["logprobs"][key]]
            assert joined == choice["logprobs"][key]


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True}], ids=["drawn", "searched"])
def test_n_choices_of_each_prompt_count_the_prompt_once(shared_server, fields):
    body = {"prompt": [[1], [2, 3]], "n": 3, "max_tokens": 5} | fields
    whole = shared_server.client.post("/v1/completions", json=body).json()
    # Choice 3 is the first of the second prompt; answer i is i tokens shorter than max_tokens.
    answers = [(ids, i) for ids in ([1], [2, 3]) for i in range(3)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == [
        _answer(ids, 5, index=i) for ids, i in answers
    ]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 2 * (5 + 4 + 3)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all(choice["logprobs"] is None for choice in whole["choices"])


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_beam_search": True}, {"stream_interval": 2}],
    ids=["drawn", "searched", "in intervals"],
)
def test_stream_of_n_choices_says_the_same_as_the_whole(shared_server, fields):
    body = {"prompt": [[1], [2, 3]], "n": 3, "max_tokens": 5, "logprobs": 2} | fields
    whole = shared_server.client.post("/v1/completions", json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with shared_server.client.stream("POST", "/v1/completions", json=body) as response:
        *chunks, last = _events(response)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["length"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in part["logprobs"][key]]
            assert joined == choice["logprobs"][key]


def test_usage_of_a_chunk_counts_all_tokens_so_far(shared_server):
    body = {"prompt": [[1], [2, 3]], "n": 2, "max_tokens": 5, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": options}
    with shared_server.client.stream("POST", "/v1/completions", json=body) as response:
        chunks = _events(response)
    num_sent = 0
    for chunk in chunks:
        num_sent += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == num_sent
    assert num_sent == 2 * (5 + 4)


def test_usage_counts_tokens_that_were_cut_from_prompts(start_server):
    server = start_server()
    body = {"prompt": [[1], [2, 3]], "max_tokens": 2}

    def details():
        whole = server.client.post("/v1/completions", json=body).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with server.client.stream("POST", "/v1/completions", json=body | options) as response:
            assert _events(response)[-1]["usage"] == whole
        assert whole["prompt_tokens"] == 3
        return whole["prompt_tokens_details"]

    assert "truncated_tokens" not in details()
    server.engine.num_truncated_tokens = 5
    assert details()["truncated_tokens"] == 10
    chat = {"messages": [{"role": "user", "content": "a"}]}
    usage = server.client.post("/v1/chat/completions", json=chat).json()["usage"]
    assert usage["prompt_tokens_details"]["truncated_tokens"] == 5
    usage = server.client.post("/v1/responses", json={"input": "a"}).json()["usage"]
    assert usage["input_tokens_details"]["truncated_tokens"] == 5


def test_the_n_best_of_best_of_are_returned_and_all_are_counted(shared_server):
    body = {"prompt": ["a", "b"], "max_tokens": 8, "n": 2, "best_of": 5}
    answer = shared_server.client.post("/v1/completions", json=body).json()
    # The engine draws them with -1, -3, -5, -2 and -4 a token: completions 0 and 3 are the best.
    expected = [_answer([256, ord(letter)], 8, index=index) for letter in "ab" for index in (0, 3)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    # Logprobs are what they are ranked by, and stay inside.
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert shared_server.engine.seen_params[-1].n == 5
    assert answer["usage"]["completion_tokens"] == 2 * (8 + 7 + 6 + 5 + 4)
    assert answer["usage"]["prompt_tokens"] == 4


def test_stream_without_include_usage_has_no_usage(shared_server):
    body = {"prompt": "a", "stream": True}
    with shared_server.client.stream("POST", "/v1/completions", json=body) as response:
        events = _events(response)
    assert all("usage" not in event and event["choices"] for event in events)


def test_logprobs_hold_the_drawn_token_besides_the_likely_ones(shared_server):
    body = {"prompt": [97], "max_tokens": 2, "logprobs": 1}
    choice = shared_server.client.post("/v1/completions", json=body).json()["choices"][0]
    # 97 % 26 is 19: the answer begins with "t"; the fake's most likely token is "A".
    assert choice["logprobs"] == {
        "tokens": ["t", "u"],
        "token_logprobs": [-1.0, -1.0],
        "text_offset": [0, 1],
        "top_logprobs": [{"t": -1.0, "A": 0.0}, {"u": -1.0, "A": 0.0}],
    }


def test_all_logprobs_are_returned_if_the_server_allows_it(start_server):
    server = start_server()
    info = dataclasses.replace(server.engine.model_info, max_logprobs=-1)
    server.engine.model_info = info
    body = {"prompt": "a", "max_tokens": 1, "logprobs": -1}
    # What an engine tells of: this one has as many as it was asked for.
    server.engine.tops_of_all = 30
    (choice,) = server.client.post("/v1/completions", json=body).json()["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert len(top) == 30
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
    answer = server.client.post("/v1/chat/completions", json=chat | {"top_logprobs": -1}).json()
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 30
    assert server.engine.seen_params[-1].logprobs == -1


def test_impossible_token_has_a_logprob_that_json_can_hold(shared_server):
    body = {"prompt": [97], "max_tokens": 1, "logprobs": 6}
    choice = shared_server.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0]["F"] == -9999.0


def test_fields_reach_the_engine(shared_server):
    body = {
        "prompt": "a",
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "max_tokens": 3,
        "stop": ["x", "y"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "priority": -3,
        "cache_salt": "tenant",
        "add_special_tokens": False,
        "some_field_nobody_knows": {"x": 1},
        "user": "me",
        "n": 1,
        "logit_bias": None,
    }
    assert shared_server.client.post("/v1/completions", json=body).status_code == 200
    params = shared_server.engine.seen_params[-1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.stop_strings) == (11, 3, ("x", "y"))
    assert (params.stop_token_ids, params.ignore_eos) == ([5], True)
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert shared_server.engine.seen_priorities[-1] == -3
    assert shared_server.engine.seen_prompts[-1] == {
        "prompt": "a",
        "add_special_tokens": False,
        "cache_salt": "tenant",
    }


def test_null_means_the_default(shared_server):
    names = ("temperature", "top_p", "max_tokens", "stop", "stream", "logprobs", "seed", "n")
    body = {"prompt": "a"} | dict.fromkeys(names)
    assert shared_server.client.post("/v1/completions", json=body).status_code == 200
    params = shared_server.engine.seen_params[-1]
    assert (params.temperature, params.max_tokens, params.logprobs) == (1.0, 16, None)


def test_absent_fields_have_the_models_defaults(start_server):
    server = start_server()
    server.engine.set_sampling_defaults(temperature=0.5, top_k=3, max_new_tokens=4, limit=4)
    for fields in ({}, {"temperature": 0.9, "top_k": 0, "max_tokens": 99}):
        body = {"prompt": "a"} | fields
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
    left_out, given = server.engine.seen_params
    assert (left_out.temperature, left_out.top_k) == (0.5, 3)
    assert (given.temperature, given.top_k) == (0.9, 0)


def test_openai_client_completes_and_streams(shared_server):
    client = openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none")
    with client:
        whole = client.completions.create(
            model=MODEL_NAME, prompt="hello", max_tokens=9, logprobs=3
        )
        stream = client.completions.create(
            model=MODEL_NAME,
            prompt="hello",
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert whole.choices[0].text == "".join(c.choices[0].text for c in chunks if c.choices)
    assert whole.choices[0].logprobs.tokens == list(whole.choices[0].text)
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 2


def test_64_streams_at_once_all_get_their_own_text(start_server):
    server = start_server(seconds_per_token=HELD_S)

    def stream(i):
        body = {"prompt": [i + 1], "max_tokens": 50, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            return "".join(event["choices"][0]["text"] for event in _events(response))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        texts = pool.map(stream, range(64))
        server.answer_once_running(64, seconds_per_token=0.005)
        texts = list(texts)
    assert texts == [_answer([i + 1], 50) for i in range(64)]
    assert not server.engine.running
