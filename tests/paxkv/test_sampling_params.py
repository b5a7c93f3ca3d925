"""SamplingParams refuses what it cannot honour and says what is allowed."""

import math

import pytest

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.sampling_params import MAX_LOGPROBS, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.max_tokens == 16
    assert params.stop_strings == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
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
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("ignore_eos", "yes"),
    ],
)
def test_bad_value_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 3),
        ("prompt_logprobs", 1),
        ("logit_bias", {5: 1.0}),
        ("bad_words", ["x"]),
    ],
)
def test_field_without_effect_is_refused_not_ignored(field: str, value: object) -> None:
    with pytest.raises(UnsupportedFeatureError, match=field):
        SamplingParams(**{field: value})


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop="END", detokenize=False)


def test_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
