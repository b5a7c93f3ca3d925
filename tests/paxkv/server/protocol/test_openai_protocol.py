"""What a request body turns into."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from paxkv.config.server_config import ServerConfig
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.openai_protocol import (
    completion_prompts,
    parse_chat,
    parse_completion,
    prompt_with_options,
    shorten,
)
from paxkv.text.chat_template import ChatTemplate
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import MODEL_NAME, FakeEngine
from tests.paxkv.server.request_bodies import REQUESTS

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "neutral", [{"functions": []}, {"modalities": ["text"]}, {"vllm_xargs": None}]
)
def test_neutral_value_of_an_unsupported_field_passes(neutral):
    parse_chat({"messages": [USER]} | neutral)


@pytest.mark.parametrize(
    "asking", [{"functions": {}}, {"modalities": "text"}, {"n": True, "vllm_xargs": []}]
)
def test_value_that_only_looks_neutral_is_refused(asking):
    with pytest.raises(UnsupportedFeatureError):
        parse_chat({"messages": [USER]} | asking)


# What a client sends that fills in every field from vLLM's own description.
_SHARED_DEFAULTS = {
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "length_penalty": 1.0, "n": 1},
    **{"stop": [], "stop_token_ids": [], "bad_words": [], "min_tokens": 0, "priority": 0},
    **{"include_stop_str_in_output": False, "ignore_eos": False, "use_beam_search": False},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"stream": False, "stream_options": {}, "echo": False, "model": ""},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "add_special_tokens": True}),
        (
            "/v1/chat/completions",
            {"messages": [USER], "logprobs": False, "top_logprobs": 0, "tool_choice": "none"}
            | {"add_generation_prompt": True, "continue_final_message": False}
            | {"add_special_tokens": False, "include_reasoning": True, "parallel_tool_calls": True},
        ),
    ],
)
def test_a_body_with_every_default_of_vllm_is_accepted(shared_server, path, fields):
    body = _SHARED_DEFAULTS | fields | {"max_tokens": 2}
    response = shared_server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == MODEL_NAME


# What only the engine's own requests may say.
INTERNAL_FIELDS = ("lora_name", "mm_features", "needs_grammar", "fork_from", "keep_blocks")


@pytest.mark.parametrize("name", INTERNAL_FIELDS)
def test_internal_fields_of_a_request_cannot_be_sent(name):
    request = parse_completion({"prompt": "a", name: "x"})
    assert not hasattr(request, name)
    prompt = prompt_with_options("a", request, add_special_tokens=True)
    assert set(prompt) == {"prompt", "add_special_tokens"}


@pytest.mark.parametrize(
    ("asking", "remedy"),
    [
        ({"functions": [{}]}, "or send []."),
        ({"modalities": ["text", "audio"]}, 'or send ["text"].'),
        ({"guided_json": {}}, "leave it out."),
    ],
)
def test_refusal_says_in_json_what_to_send_instead(asking, remedy):
    with pytest.raises(UnsupportedFeatureError) as raised:
        parse_chat({"messages": [USER]} | asking)
    assert str(raised.value).endswith(remedy)


def test_long_prompt_is_not_quoted_whole():
    with pytest.raises(InvalidRequestError) as raised:
        completion_prompts([["x" * 10_000]])
    assert len(str(raised.value)) < 250


def test_prompt_carries_its_options():
    request = parse_completion({"prompt": "a", "cache_salt": "s"})
    assert prompt_with_options([1], request, add_special_tokens=True) == {
        "prompt_token_ids": [1],
        "add_special_tokens": True,
        "cache_salt": "s",
    }
    for num_kept in (-1, "auto"):
        request = parse_completion({"prompt": "a", "truncate_prompt_tokens": num_kept})
        prompt = prompt_with_options("a", request, add_special_tokens=True)
        assert prompt["truncate_prompt_tokens"] == num_kept


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": True}])
def test_the_last_message_is_continued_only_where_no_other_begins(fields):
    with pytest.raises(InvalidRequestError) as raised:
        parse_chat({"messages": [USER], "continue_final_message": True} | fields)
    assert raised.value.param == "continue_final_message"


def test_prompt_logprobs_are_not_streamed():
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        parse_completion({"prompt": "a", "prompt_logprobs": 1, "stream": True})


def test_an_error_quotes_the_value_at_any_depth_and_length():
    prompt = []
    for _ in range(200_000):
        prompt = [prompt]
    with pytest.raises(InvalidRequestError, match=r"it contains \[+\.\.\.\]+\."):
        completion_prompts(prompt)
    for long in ([[[1] * 10**6]], {"a" * 10**6: ["b" * 10**6] * 99}, "c" * 10**6, 10**400):
        assert len(shorten(long)) <= 80
    assert shorten(10**79) == str(10**79)  # 80 characters
    assert shorten({"a": [1, "b"]}) == "{'a': [1, 'b']}"


@pytest.fixture(scope="module")
def fuzzed_server():
    config = ServerConfig(
        port=0,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        trust_request_chat_template=True,
    )
    engine = FakeEngine()
    # The real one: what messages do to it is part of the question.
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson }}"
    engine.chat_template = ChatTemplate(source)
    with run_server(engine, config) as server:
        yield server


def check_answers_below_500(server, num_cases: int) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=num_cases,
        suppress_health_check=list(HealthCheck),
    )
    @given(request=REQUESTS)
    def check(request):
        path, body = request
        response = server.client.post(
            path,
            content=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        )
        statuses.add(response.status_code)
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert len(response.text) < 2000
        assert "internal_error" not in response.text

    check()
    assert statuses == {200, 400}
    assert server.client.get("/health").status_code == 200
    assert not server.engine.running


def test_no_body_is_a_server_error(fuzzed_server):
    check_answers_below_500(fuzzed_server, 60)


# Some minutes: run it with `pytest -m slow tests/paxkv/server/protocol/test_openai_protocol.py`.
@pytest.mark.slow
def test_none_of_20000_bodies_is_a_server_error(fuzzed_server):
    check_answers_below_500(fuzzed_server, 20_000)
