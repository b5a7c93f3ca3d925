"""What a request body turns into."""

import pytest

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.sampling_params import BeamSearchParams
from paxkv.server.openai_protocol import (
    chat_messages,
    chat_sampling_params,
    completion_prompts,
    completion_sampling_params,
    parse_chat,
    parse_completion,
    prompt_with_options,
)

USER = {"role": "user", "content": "hi"}


def test_completion_stops_at_16_tokens_and_chat_goes_on_unless_told():
    assert completion_sampling_params(parse_completion({"prompt": "a"})).max_tokens == 16
    assert chat_sampling_params(parse_chat({"messages": [USER]})).max_tokens is None


def test_temperature_is_1_unless_told():
    assert completion_sampling_params(parse_completion({"prompt": "a"})).temperature == 1.0


def test_chat_logprobs_without_alternatives_ask_for_the_drawn_token_alone():
    def logprobs(**fields):
        return chat_sampling_params(parse_chat({"messages": [USER]} | fields)).logprobs

    assert logprobs() is None
    assert logprobs(logprobs=False) is None
    assert logprobs(logprobs=True) == 0
    assert logprobs(logprobs=True, top_logprobs=4) == 4


@pytest.mark.parametrize(
    "neutral", [{"echo": False}, {"tools": []}, {"tools": None}, {"frequency_penalty": 0.0}]
)
def test_neutral_value_of_an_unsupported_field_passes(neutral):
    parse_chat({"messages": [USER]} | neutral)


@pytest.mark.parametrize(
    "asking", [{"echo": 0}, {"frequency_penalty": False}, {"n": True, "tools": {}}]
)
def test_value_that_only_looks_neutral_is_refused(asking):
    with pytest.raises(UnsupportedFeatureError):
        parse_chat({"messages": [USER]} | asking)


def test_n_reaches_the_sampling_params_and_best_of_may_repeat_it():
    request = parse_completion({"prompt": "a", "n": 3, "best_of": 3})
    assert completion_sampling_params(request).n == 3
    assert completion_sampling_params(parse_completion({"prompt": "a", "best_of": 1})).n == 1
    assert chat_sampling_params(parse_chat({"messages": [USER], "n": None})).n == 1


def test_beam_search_takes_its_width_from_n_and_draws_nothing_unless_told():
    fields = {"use_beam_search": True, "n": 4, "length_penalty": 0.5, "ignore_eos": True}
    assert completion_sampling_params(
        parse_completion({"prompt": "a"} | fields)
    ) == BeamSearchParams(
        beam_width=4, max_tokens=16, temperature=0.0, length_penalty=0.5, ignore_eos=True
    )
    fields = {"use_beam_search": True, "max_tokens": 7, "temperature": 1.0, "top_p": 1}
    assert chat_sampling_params(parse_chat({"messages": [USER]} | fields)) == BeamSearchParams(
        beam_width=1, max_tokens=7, temperature=1.0
    )


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
        ({"continue_final_message": True}, "or send false."),
        ({"response_format": {"type": "json_object"}}, 'or send {"type":"text"}.'),
        ({"guided_json": {}}, "leave it out."),
    ],
)
def test_refusal_says_in_json_what_to_send_instead(asking, remedy):
    with pytest.raises(UnsupportedFeatureError) as raised:
        parse_chat({"messages": [USER]} | asking)
    assert str(raised.value).endswith(remedy)


def test_nested_unsupported_option_is_named_with_its_path():
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    with pytest.raises(UnsupportedFeatureError) as raised:
        parse_completion({"prompt": "a"} | fields)
    assert raised.value.param == "stream_options.continuous_usage_stats"


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


def test_name_of_a_speaker_reaches_the_template_and_unknown_keys_do_not():
    messages = chat_messages([USER | {"name": "ann", "refusal": None, "x": 1}])
    assert messages == [USER | {"name": "ann"}]


def test_prompt_too_deep_to_be_quoted_is_still_the_callers_mistake():
    prompt = []
    for _ in range(200_000):
        prompt = [prompt]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        completion_prompts(prompt)
