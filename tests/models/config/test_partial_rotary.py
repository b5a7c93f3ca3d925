"""Which share of a head is turned, in both generations of config.json."""

import pytest

from models.config.partial_rotary import read_rotary_factor, without_rotary_factor
from models.config.rope_config import RopeConfig, parse_rope_config
from models.errors import ModelConfigError

HALF = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("hf_config", "wanted"),
    [
        ({}, 0.25),
        ({"partial_rotary_factor": None}, 0.25),
        (HALF, 0.5),
        ({"rope_parameters": HALF}, 0.5),
        ({"rope_parameters": HALF, "partial_rotary_factor": 0.75}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e4}, **HALF}, 0.5),
        # The older spelling replaces the newer one, also where it has no factor.
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": HALF}, 0.25),
        ({"rope_scaling": None, "rope_parameters": HALF}, 0.5),
    ],
)
def test_factor_is_where_transformers_finds_it(hf_config, wanted):
    assert read_rotary_factor(hf_config, default=0.25) == wanted


def test_factor_of_the_wrong_type_is_named():
    with pytest.raises(ModelConfigError, match="partial_rotary_factor is 'half'"):
        read_rotary_factor({"partial_rotary_factor": "half"}, default=0.25)


def test_only_the_factor_is_removed_for_the_embedding():
    fields = {"rope_theta": 5e4, "rope_scaling": None, **HALF}
    assert without_rotary_factor(fields) == {"rope_theta": 5e4, "rope_scaling": None}
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **HALF}, **HALF}
    rope = parse_rope_config(without_rotary_factor(scaled), 1024)
    assert rope == RopeConfig(kind="linear", factor=2.0)


def test_the_factors_of_all_layer_types_are_left_out():
    types = {"full_attention": {"rope_theta": 1e6, **HALF}, "sliding_attention": None}
    left = without_rotary_factor({"rope_parameters": types})
    assert left == {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None}
    }
