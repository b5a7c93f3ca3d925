"""Rotary parameters are read from both generations of config.json."""

import math

import pytest

from models.config.rope_config import (
    RopeConfig,
    max_scaled_positions,
    parse_rope_config,
    parse_ropes_by_layer_type,
    rope_for_length,
)
from models.errors import ModelConfigError, UnsupportedModelError

LLAMA3_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**fields: object) -> RopeConfig:
    return parse_rope_config(fields, max_position_embeddings=4096)


def test_nothing_written_is_the_plain_embedding():
    assert parse() == RopeConfig(kind="default", theta=10_000.0)
    assert parse(rope_theta=5e5, rope_scaling=None) == RopeConfig(kind="default", theta=5e5)


@pytest.mark.parametrize("type_field", ["type", "rope_type"])
def test_old_form_with_either_name_of_the_kind(type_field):
    got = parse(rope_theta=5e5, rope_scaling={type_field: "linear", "factor": 2})
    assert got == RopeConfig(kind="linear", theta=5e5, factor=2.0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", LLAMA3_FIELDS),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 24.0}),
    ],
)
def test_new_form_means_the_same_as_the_old(kind, fields):
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": kind} | fields)
    new = parse(rope_parameters={"rope_type": kind, "rope_theta": 5e5} | fields)
    assert new == old
    assert new.kind == kind


def test_dynamic_grows_from_max_position_embeddings_whatever_else_is_written():
    rope = parse(
        rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 99}
    )
    assert rope.original_max_position_embeddings == 4096


def test_original_length_is_found_where_transformers_looks():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert parse(rope_scaling=yarn).original_max_position_embeddings == 4096
    beside = yarn | {"original_max_position_embeddings": 1024}
    assert parse(rope_scaling=beside).original_max_position_embeddings == 1024
    above = parse(rope_scaling=beside, original_max_position_embeddings=2048)
    assert above.original_max_position_embeddings == 2048


def test_proportional_has_a_share_of_the_head_and_may_have_a_factor():
    fields = {"rope_type": "proportional", "rope_theta": 1e6}
    assert parse(rope_parameters=fields) == RopeConfig(kind="proportional", theta=1e6)
    more = fields | {"partial_rotary_factor": 0.25, "factor": 2.0}
    rope = parse(rope_parameters=more)
    assert (rope.turned_share, rope.factor) == (0.25, 2.0)
    assert max_scaled_positions(rope, 4096) == 8192


def test_proportional_takes_a_factor_for_all_layers_as_default():
    fields = {"rope_type": "proportional", "rope_theta": 1e4}
    rope = parse(rope_parameters=fields, partial_rotary_factor=0.25)
    assert rope.turned_share == 0.25
    own = fields | {"partial_rotary_factor": 0.5}
    assert parse(rope_parameters=own, partial_rotary_factor=0.25).turned_share == 0.5


def test_yarn_defaults():
    rope = parse(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512})
    assert rope.factor == 4096 / 512
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim) == (None, None, None)


def test_unknown_kind_is_refused_and_known_ones_are_named():
    with pytest.raises(UnsupportedModelError) as error:
        parse(rope_scaling={"rope_type": "ntk", "factor": 2.0})
    assert "'ntk'" in str(error.value)
    assert "default, linear, dynamic, llama3, yarn, longrope, proportional" in str(error.value)


def longrope(**fields: object) -> dict[str, object]:
    return {"rope_type": "longrope", "short_factor": [1.0, 2], "long_factor": [3.0, 4], **fields}


def test_longrope_scales_attention_by_the_ratio_of_the_lengths():
    rope = parse(rope_scaling=longrope(original_max_position_embeddings=512))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(512)))
    assert (rope.short_factors, rope.long_factors) == ((1.0, 2.0), (3.0, 4.0))
    assert parse(rope_scaling=longrope(attention_factor=1.25)).attention_factor == 1.25
    assert parse(rope_scaling=longrope()).attention_factor == 1.0
    # The length in config.json is the one after scaling.
    assert max_scaled_positions(rope, 4096) == 4096


def test_longrope_has_long_factors_if_requests_may_pass_the_original_length():
    rope = parse(rope_scaling=longrope(original_max_position_embeddings=512))
    assert rope.is_long
    assert rope_for_length(rope, 513).is_long
    assert not rope_for_length(rope, 512).is_long
    assert rope_for_length(RopeConfig(), 512) == RopeConfig()


@pytest.mark.parametrize("factors", [None, 2.0, [1.0, 0.0], [True]])
def test_malformed_factors_of_longrope_are_named(factors):
    with pytest.raises(ModelConfigError, match="expected a list of positive numbers"):
        parse(rope_scaling=longrope(long_factor=factors))


def test_older_names_of_kinds_are_known():
    plain = {"type": "mrope", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    assert parse(rope_scaling=plain) == RopeConfig(theta=1e6)
    fields = longrope(original_max_position_embeddings=512)
    older = {name: value for name, value in fields.items() if name != "rope_type"}
    assert parse(rope_scaling=older | {"type": "su"}) == parse(rope_scaling=fields)


@pytest.mark.parametrize("kind", [7, ["linear"]])
def test_a_kind_that_is_no_name_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="rope type .* is not supported"):
        parse(rope_scaling={"type": kind, "factor": 2.0, "other": 1})


def test_rope_per_layer_type_is_refused():
    with pytest.raises(UnsupportedModelError, match="full_attention"):
        parse(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}})


LINEAR = RopeConfig(kind="linear", theta=1e6, factor=8.0)


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        # The bases where they are left out.
        ({}, RopeConfig(theta=1e6), RopeConfig(theta=1e4)),
        # transformers 4: the scaling is of the full layers only.
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            LINEAR,
            RopeConfig(theta=2e4),
        ),
        # transformers 5.
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                }
            },
            LINEAR,
            RopeConfig(theta=2e4),
        ),
        (
            {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 3e4}}},
            RopeConfig(theta=1e6),
            RopeConfig(theta=3e4),
        ),
    ],
)
def test_embeddings_by_layer_type_in_both_spellings(fields, full, sliding):
    assert parse_ropes_by_layer_type(fields, max_position_embeddings=4096) == (full, sliding)


def test_one_embedding_for_all_layers_is_refused_where_two_are_wanted():
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ModelConfigError, match="rope_type, rope_theta for all layers"):
        parse_ropes_by_layer_type(fields, max_position_embeddings=4096)


@pytest.mark.parametrize(
    "ropes",
    [
        {"full_attention": {"rope_theta": 1e6}},
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}},
        {},
    ],
)
def test_required_layer_types_have_a_base_of_their_own(ropes):
    fields = {"rope_parameters": ropes}
    assert parse_ropes_by_layer_type(fields, 4096)[0].theta == 1e6
    with pytest.raises(ModelConfigError, match="no rope_theta for sliding_attention"):
        parse_ropes_by_layer_type(fields, 4096, required_types=["sliding_attention"])


def test_partial_rotation_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor=0\.5"):
        parse(partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor=0\.5"):
        parse(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        ({"rope_type": "llama3"} | LLAMA3_FIELDS | {"low_freq_factor": 4.5}, "low_freq_factor=4.5"),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 1.5},
            "partial_rotary_factor=1.5; expected at most 1",
        ),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.0},
            r"partial_rotary_factor is 0\.0",
        ),
        ({"rope_type": "yarn", "factor": -1.0}, r"factor is -1\.0"),
        ([1, 2], "expected an object"),
    ],
)
def test_malformed_parameters_are_named(rope, message):
    with pytest.raises(ModelConfigError, match=message):
        parse(rope_scaling=rope)
