"""Sampling defaults accept values that a request could have, and list their changes."""

import pytest

from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.errors import ConfigError


def test_an_override_must_be_an_object_of_known_fields() -> None:
    assert GenerationConfig.from_fields({"top_k": 5}) == GenerationConfig(top_k=5)
    for fields, complaint in (
        ([], "must be a JSON object"),
        ({"top_q": 1}, "may have temperature, .*; got top_q"),
        ({"eos_token_id": 1}, "got eos_token_id"),
        ({"top_p": "wide"}, "override_generation_config: top_p must be"),
        ({"max_new_tokens": None}, "max_new_tokens must be a number"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            GenerationConfig.from_fields(fields)


def test_changes_are_the_values_that_are_not_neutral() -> None:
    config = GenerationConfig(temperature=1.0, top_k=20, min_p=0.0, max_new_tokens=5)
    assert config.changes == {"top_k": 20, "max_new_tokens": 5}
