"""A server's settings for structured outputs are checked once, and applied to every request."""

import pytest

from paxkv.config.structured_outputs_config import StructuredOutputsConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import ConfigError


def test_fields_are_vllms():
    fields = {
        "backend": "guidance",
        "disable_fallback": True,
        "disable_any_whitespace": True,
        "enable_in_reasoning": True,
    }
    config = StructuredOutputsConfig.from_fields(fields)
    assert config == StructuredOutputsConfig(disable_any_whitespace=True, enable_in_reasoning=True)
    assert StructuredOutputsConfig.from_fields({}) == StructuredOutputsConfig()


@pytest.mark.parametrize(
    "fields",
    [
        5,
        {"backend": "xgrammar"},
        {"disable_any_whitespace": "yes"},
        {"disable_fallback": 1},
        {"enable_in_thinking": True},
    ],
)
def test_unknown_fields_and_wrong_types_are_rejected(fields):
    with pytest.raises(ConfigError):
        StructuredOutputsConfig.from_fields(fields)


def test_settings_apply_to_every_request():
    config = StructuredOutputsConfig(
        disable_any_whitespace=True, disable_additional_properties=True
    )
    applied = config.apply(StructuredOutputsParams(json="{}"))
    assert applied == StructuredOutputsParams(
        json="{}", disable_any_whitespace=True, disable_additional_properties=True
    )
    own = StructuredOutputsParams(json="{}", whitespace_pattern=" ?")
    assert config.apply(own).whitespace_pattern == " ?"
    plain = StructuredOutputsParams(json="{}", disable_any_whitespace=True)
    assert StructuredOutputsConfig().apply(plain) == plain
