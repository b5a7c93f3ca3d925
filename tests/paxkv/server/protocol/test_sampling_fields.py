"""What the sampling fields of a body turn into."""

import dataclasses

import pytest

from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.config.structured_outputs_config import StructuredOutputsConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.openai_protocol import parse_chat, parse_completion
from paxkv.server.protocol.sampling_fields import (
    chat_keywords,
    chat_sampling_params,
    completion_keywords,
    completion_sampling_params,
    echoes_prompt_only,
)
from paxkv.server.protocol.structured_fields import with_server_settings
from paxkv.server.protocol.tool_choice import ToolUse

USER = {"role": "user", "content": "hi"}
NEUTRAL = SamplingDefaults()
DEFAULTS = SamplingDefaults(
    generation_config=GenerationConfig(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.5
    )
)


def test_completions_default_to_16_tokens_and_chats_to_no_limit():
    assert completion_sampling_params(parse_completion({"prompt": "a"}), NEUTRAL).max_tokens == 16
    assert chat_sampling_params(parse_chat({"messages": [USER]}), NEUTRAL).max_tokens is None


def test_temperature_is_1_by_default():
    assert completion_sampling_params(parse_completion({"prompt": "a"}), NEUTRAL).temperature == 1.0


def test_chat_logprobs_without_alternatives_ask_for_the_drawn_token_alone():
    def logprobs(**fields):
        return chat_sampling_params(parse_chat({"messages": [USER]} | fields), NEUTRAL).logprobs

    assert logprobs() is None
    assert logprobs(logprobs=False) is None
    assert logprobs(logprobs=True) == 0
    assert logprobs(logprobs=True, top_logprobs=4) == 4


def test_n_reaches_the_sampling_params_and_best_of_may_equal_it():
    request = parse_completion({"prompt": "a", "n": 3, "best_of": 3})
    assert completion_sampling_params(request, NEUTRAL).n == 3
    assert (
        completion_sampling_params(parse_completion({"prompt": "a", "best_of": 1}), NEUTRAL).n == 1
    )
    assert chat_sampling_params(parse_chat({"messages": [USER], "n": None}), NEUTRAL).n == 1


def test_beam_width_is_n_and_the_temperature_of_a_search_is_0_by_default():
    fields = {"use_beam_search": True, "n": 4, "length_penalty": 0.5, "ignore_eos": True}
    assert completion_sampling_params(
        parse_completion({"prompt": "a"} | fields), NEUTRAL
    ) == BeamSearchParams(
        beam_width=4, max_tokens=16, temperature=0.0, length_penalty=0.5, ignore_eos=True
    )
    fields = {"use_beam_search": True, "max_tokens": 7, "temperature": 1.0, "top_p": 1}
    assert chat_sampling_params(
        parse_chat({"messages": [USER]} | fields), NEUTRAL
    ) == BeamSearchParams(beam_width=1, max_tokens=7, temperature=1.0)


def _keywords(**fields):
    return completion_keywords(parse_completion({"prompt": "a"} | fields), NEUTRAL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", -0.5),
        ("frequency_penalty", 1.5),
        ("repetition_penalty", 1.25),
        ("min_p", 0.125),
        ("min_tokens", 3),
        ("bad_words", ["a b", "c"]),
        ("allowed_token_ids", [4, 5]),
        ("prompt_logprobs", 2),
        ("include_stop_str_in_output", True),
        ("stop", ["a"]),
        ("seed", -7),
    ],
)
def test_fields_of_the_same_name_are_passed_on(name, value):
    assert _keywords(**{name: value})[name] == value
    assert chat_keywords(parse_chat({"messages": [USER], name: value}), NEUTRAL)[name] == value
    assert name not in _keywords()


def test_logit_bias_is_by_token_id_and_stays_within_openais_bounds():
    biases = {"17": 1.5, "0": -250, "3": 250.0}
    assert _keywords(logit_bias=biases)["logit_bias"] == {17: 1.5, 0: -100.0, 3: 100.0}


@pytest.mark.parametrize("key", ["a", "-1", "1.0", "", "\u0661", "1" * 5000])
def test_logit_bias_with_a_key_that_is_no_token_is_refused(key):
    with pytest.raises(InvalidRequestError) as raised:
        _keywords(logit_bias={key: 1})
    assert raised.value.param == "logit_bias"
    assert len(str(raised.value)) < 200


def test_1024_logit_biases_are_accepted():
    biases = dict.fromkeys(map(str, range(1024)), 1)
    assert len(_keywords(logit_bias=biases)["logit_bias"]) == 1024


def test_too_many_logit_biases_are_counted_before_they_are_read():
    request = parse_completion(
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(-9, 2000)), 1)}
    )
    with pytest.raises(InvalidRequestError, match="at most 1024"):
        completion_sampling_params(request, NEUTRAL)


def test_echo_with_logprobs_scores_the_prompt():
    assert _keywords(echo=True, logprobs=3)["prompt_logprobs"] == 3
    assert _keywords(echo=True, logprobs=3, prompt_logprobs=1)["prompt_logprobs"] == 1
    assert "prompt_logprobs" not in _keywords(echo=True)
    assert "prompt_logprobs" not in _keywords(logprobs=3)


def test_max_tokens_may_be_0_only_with_echo():
    assert _keywords(echo=True, max_tokens=0)["max_tokens"] == 1
    with pytest.raises(InvalidRequestError, match="max_tokens must be"):
        _keywords(max_tokens=0)
    request = parse_completion({"prompt": "a", "echo": True, "max_tokens": 0})
    assert echoes_prompt_only(request)
    assert not echoes_prompt_only(parse_completion({"prompt": "a", "echo": True}))


@pytest.mark.parametrize("form", [None, {"type": "json_object"}])
def test_a_forced_call_is_a_grammar_with_every_response_format(form):
    request = parse_chat({"messages": [USER], "response_format": form})
    keywords = chat_keywords(request, NEUTRAL, ToolUse(schema='{"type":"object"}'))
    assert keywords["structured_outputs"] == StructuredOutputsParams(json='{"type":"object"}')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"choice": ["a"]}}, "leave structured_outputs out"),
        ({"response_format": {"type": "yaml"}}, "response_format.type must be"),
    ],
)
def test_a_forced_call_refuses_a_grammar_of_the_whole_answer(fields, words):
    with pytest.raises(InvalidRequestError, match=words):
        chat_keywords(parse_chat({"messages": [USER]} | fields), NEUTRAL, ToolUse(schema="{}"))


def test_json_options_alone_may_accompany_a_response_format():
    fields = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"disable_any_whitespace": True},
    }
    form = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    assert _keywords(**fields)["structured_outputs"] == form
    fields["structured_outputs"] = {"regex": "a"}
    with pytest.raises(InvalidRequestError, match="both ask for a form"):
        _keywords(**fields)
    with pytest.raises(InvalidRequestError, match="must have one of"):
        _keywords(structured_outputs={"whitespace_pattern": " "})
    with pytest.raises(InvalidRequestError, match="has thoughts; it may have"):
        _keywords(structured_outputs={"regex": "a", "thoughts": "begun"})


def test_options_for_all_structured_output_are_added():
    config = StructuredOutputsConfig(disable_any_whitespace=True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    assert with_server_settings(params, config).structured_outputs.disable_any_whitespace
    for other in (SamplingParams(), BeamSearchParams(beam_width=2, max_tokens=1)):
        assert with_server_settings(other, config) is other


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1},
        {"logit_bias": {"1": 1}},
        {"structured_outputs": {"regex": "a"}},
        {"echo": True},
        {"min_tokens": 1},
    ],
)
def test_a_beam_search_refuses_fields_that_it_ignores(fields):
    with pytest.raises(InvalidRequestError, match="with use_beam_search"):
        parse_completion({"prompt": "a", "use_beam_search": True} | fields)


@pytest.mark.parametrize(
    ("name", "default", "given"),
    [
        ("temperature", 0.6, 1.0),
        ("top_p", 0.95, 1.0),
        ("top_k", 20, 0),
        ("min_p", 0.1, 0.0),
        ("repetition_penalty", 1.5, 1.0),
    ],
)
def test_a_field_left_out_or_null_has_the_models_default_and_one_that_is_given_wins(
    name, default, given
):
    for fields, expected in (({}, default), ({name: None}, default), ({name: given}, given)):
        completion = parse_completion({"prompt": "a"} | fields)
        chat = parse_chat({"messages": [USER]} | fields)
        for params in (
            completion_sampling_params(completion, DEFAULTS),
            chat_sampling_params(chat, DEFAULTS),
        ):
            assert getattr(params, name) == expected


def _max_tokens(defaults, **fields):
    """Of a completion, of a chat."""
    completion = parse_completion({"prompt": "a"} | fields)
    chat = parse_chat({"messages": [USER]} | fields)
    return (
        completion_sampling_params(completion, defaults).max_tokens,
        chat_sampling_params(chat, defaults).max_tokens,
    )


def test_max_new_tokens_is_a_default_and_from_the_operator_a_limit_too():
    few = SamplingDefaults(generation_config=GenerationConfig(max_new_tokens=9))
    # A chat is left open: its default must fit behind its prompt.
    assert _max_tokens(few) == (9, None)
    assert _max_tokens(few, max_tokens=30) == (30, 30)
    many = SamplingDefaults(generation_config=GenerationConfig(max_new_tokens=99))
    assert _max_tokens(many) == (16, None)
    limited = SamplingDefaults(generation_config=few.generation_config, max_tokens_limit=9)
    assert _max_tokens(limited) == (9, None)
    assert _max_tokens(limited, max_tokens=30) == (9, 9)
    assert _max_tokens(limited, max_tokens=4) == (4, 4)
    request = parse_chat({"messages": [USER], "max_completion_tokens": 30})
    assert chat_sampling_params(request, limited).max_tokens == 9


def test_a_limit_does_not_hide_other_errors():
    limited = SamplingDefaults(max_tokens_limit=9)
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (-1, 0, 2**31):
            message = f"{name} must be .*, got {value}"
            chat = parse_chat({"messages": [USER], name: value})
            with pytest.raises(InvalidRequestError, match=message):
                chat_sampling_params(chat, limited)
            for fields in ({}, {"use_beam_search": True}, {"echo": True}):
                if name == "max_completion_tokens" or (value == 0 and "echo" in fields):
                    continue
                completion = parse_completion({"prompt": "a", name: value} | fields)
                with pytest.raises(InvalidRequestError, match=message):
                    completion_sampling_params(completion, limited)
    echo = parse_completion({"prompt": "a", "echo": True, "max_tokens": 0})
    assert completion_sampling_params(echo, limited).max_tokens == 1


def test_a_limit_holds_for_a_beam_search():
    limited = SamplingDefaults(max_tokens_limit=9)
    fields = {"use_beam_search": True, "n": 2}
    for asked, num_tokens in ((30, 9), (4, 4)):
        fields["max_tokens"] = asked
        completion = parse_completion({"prompt": "a"} | fields)
        chat = parse_chat({"messages": [USER]} | fields)
        assert completion_sampling_params(completion, limited).max_tokens == num_tokens
        assert chat_sampling_params(chat, limited).max_tokens == num_tokens


def test_a_beam_search_has_the_models_length_and_no_other_default():
    defaults = SamplingDefaults(
        generation_config=GenerationConfig(temperature=0.6, top_k=20, max_new_tokens=9)
    )
    fields = {"use_beam_search": True, "n": 2}
    expected = BeamSearchParams(beam_width=2, max_tokens=9, temperature=0.0)
    completion = parse_completion({"prompt": "a"} | fields)
    assert completion_sampling_params(completion, defaults) == expected
    # Left open, as in a chat without a search: it must fit behind the prompt.
    chat = parse_chat({"messages": [USER]} | fields)
    assert chat_sampling_params(chat, defaults) == dataclasses.replace(expected, max_tokens=None)
    with pytest.raises(InvalidRequestError, match="needs max_tokens"):
        chat_sampling_params(chat, DEFAULTS)


def test_a_greedy_default_draws_one_completion_unless_a_temperature_comes():
    greedy = SamplingDefaults(generation_config=GenerationConfig(temperature=0.0))
    for fields, param in (({"n": 2}, "n"), ({"best_of": 2}, "best_of")):
        with pytest.raises(InvalidRequestError, match="temperature=0") as raised:
            completion_sampling_params(parse_completion({"prompt": "a"} | fields), greedy)
        assert raised.value.param == param
        warm = parse_completion({"prompt": "a", "temperature": 1} | fields)
        assert completion_sampling_params(warm, greedy).n == 2
