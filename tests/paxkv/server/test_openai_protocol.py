"""What a request body turns into."""

import pytest

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.openai_protocol import (
    completion_prompts,
    parse_chat,
    parse_completion,
    prompt_with_options,
)

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
        ({"verbosity": "high"}, 'or send "medium".'),
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
    request = parse_completion({"prompt": "a", "truncate_prompt_tokens": -1})
    prompt = prompt_with_options("a", request, add_special_tokens=True)
    assert prompt["truncate_prompt_tokens"] == -1


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": True}])
def test_the_last_message_is_continued_only_where_no_other_begins(fields):
    with pytest.raises(InvalidRequestError) as raised:
        parse_chat({"messages": [USER], "continue_final_message": True} | fields)
    assert raised.value.param == "continue_final_message"


def test_prompt_logprobs_are_not_streamed():
    with pytest.raises(InvalidRequestError, match="whole answer only"):
        parse_completion({"prompt": "a", "prompt_logprobs": 1, "stream": True})


def test_prompt_too_deep_to_be_quoted_is_still_the_callers_mistake():
    prompt = []
    for _ in range(200_000):
        prompt = [prompt]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        completion_prompts(prompt)
