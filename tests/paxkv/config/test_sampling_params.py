"""SamplingParams rejects invalid values, and says what is allowed."""

import math

import numpy as np
import pytest

from paxkv.config.sampling_params import (
    BeamSearchParams,
    SamplingParams,
    check_num_logprobs,
)
from paxkv.contracts import wire
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.errors import InvalidRequestError


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.max_tokens == 16
    assert params.stop_strings == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 1.0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", np.float64(0.5)),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2**40),
        ("seed", 2**63),
        ("seed", 1.0),
        ("logprobs", -2),
        ("logprobs", 2**31),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", True),
        ("prompt_logprobs", np.array([1, 2])),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("stop_token_ids", 0),
        ("stop_token_ids", {}),
        ("ignore_eos", "yes"),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 0.0),
        ("min_tokens", 17),  # max_tokens is 16
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("bad_words", ["x"] * 129),
        ("bad_words", ["x" * 257]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 3),
        ("allowed_token_ids", [True]),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: "high"}),
        ("spaces_between_special_tokens", "no"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_the_error_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("num_logprobs", "max_logprobs", "is_allowed"),
    [(None, 0, True), (0, 0, True), (20, 20, True), (21, 20, False), (-1, 20, False)]
    + [(-1, -1, True), (50, -1, True), (51, -1, False), (-1, 50, True), (-1, 49, False)],
)
def test_max_logprobs_limits_the_number_of_logprobs(num_logprobs, max_logprobs, is_allowed) -> None:
    def check() -> None:
        check_num_logprobs("logprobs", num_logprobs, max_logprobs=max_logprobs, vocab_size=50)

    if is_allowed:
        check()
        return
    with pytest.raises(InvalidRequestError, match="--max-logprobs") as caught:
        check()
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, False),
        ({"logprobs": -1, "prompt_logprobs": -1}, False),
        ({"min_tokens": 4}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"bad_words": ["a"]}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"logit_bias": {1: 2.0}}, True),
    ],
)
def test_settings_that_change_logits_before_every_draw(fields, changes) -> None:
    assert SamplingParams(**fields).changes_logits == changes


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 1, "min_p": 0},
        {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
        {"bad_words": (), "logit_bias": {}, "stop": ("a",), "stop_token_ids": (1,)},
        {"bad_words": ["a"], "logit_bias": {7: -1, 8: 0.5}, "allowed_token_ids": [7, 8]},
        {"min_tokens": 16, "repetition_penalty": 2, "presence_penalty": -2},
    ],
    ids=repr,
)
def test_accepted_values_can_be_sent_to_the_engine(fields: dict[str, object]) -> None:
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(**fields)
    )
    received = wire.decode_input(wire.encode(AddRequest(request=request)))
    assert received.request.sampling_params.stop_strings == request.sampling_params.stop_strings


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a" * 9] * 10_000 + [""]},
        {"bad_words": ["a"] * 10_000},
        {"logit_bias": dict.fromkeys(range(10_000), 1.0)},
    ],
)
def test_errors_shorten_long_values(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.\.\.") as raised:
        SamplingParams(**fields)
    assert len(str(raised.value)) < 400


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop="END", detokenize=False)


def test_n_above_1_needs_a_temperature() -> None:
    assert SamplingParams(n=128).n == 128
    assert SamplingParams(n=1, temperature=0).n == 1
    with pytest.raises(
        InvalidRequestError, match="n must be 1 when the temperature is 0"
    ) as caught:
        SamplingParams(n=2, temperature=0)
    assert caught.value.param == "n"


def test_beam_search_params_have_vllms_defaults() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 11),
        ("beam_width", 2.0),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("temperature", -1),
        ("temperature", math.nan),
        ("length_penalty", 11),
        ("length_penalty", math.inf),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
    ],
)
def test_the_error_names_the_field_of_beam_search(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})
    assert caught.value.param == field


def test_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
