"""Reads of single fields of a config.json."""

import pytest

from models.config.fields import (
    read_count,
    read_layer_numbers,
    read_number,
    read_object,
    read_token_ids,
    with_defaults,
)
from models.errors import ModelConfigError
from models.registry import read_config

HF_CONFIG = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
}


def test_null_is_the_default_except_of_token_ids():
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2}
    fields = {"rms_norm_eps": None, "eos_token_id": None, "sliding_window": None, "rope_theta": 7}
    assert with_defaults(fields, defaults) == {
        "rms_norm_eps": 1e-5,
        "rope_theta": 7,
        "bos_token_id": 1,
        "eos_token_id": None,
        "sliding_window": None,
    }


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("MixtralForCausalLM", "rope_theta"),
        ("MixtralForCausalLM", "rms_norm_eps"),
        ("MiniMaxM2ForCausalLM", "rope_theta"),
        ("OlmoeForCausalLM", "rms_norm_eps"),
        ("Glm4MoeForCausalLM", "rms_norm_eps"),
    ],
)
def test_a_null_number_is_the_default_of_its_family(architecture, name):
    hf_config = HF_CONFIG | {"architectures": [architecture]}
    assert read_config(hf_config | {name: None}) == read_config(hf_config)


def test_an_integer_may_be_written_as_a_float():
    count = read_count({"size": 1024.0}, "size")
    assert (count, type(count)) == (1024, int)
    ids = read_token_ids({"ids": [2.0, 3]}, "ids")
    assert (ids, [type(token_id) for token_id in ids]) == ((2, 3), [int, int])
    assert read_layer_numbers({"layers": [0.0, 3]}, "layers") == [0, 3]


@pytest.mark.parametrize("value", [1024.5, "1024", True, 0, -1.0, float("inf"), float("nan"), [8]])
def test_other_values_are_no_count(value):
    with pytest.raises(ModelConfigError, match="config.json: size is .*; expected a positive int"):
        read_count({"size": value}, "size")


@pytest.mark.parametrize("value", ["1e-6", True, 0, -0.5, float("inf"), float("nan"), [8]])
def test_other_values_are_no_number(value):
    with pytest.raises(
        ModelConfigError, match="config.json: eps is .*; expected a positive number"
    ):
        read_number({"eps": value}, "eps")


def test_a_number_in_quotation_marks_is_not_a_number():
    with pytest.raises(ModelConfigError, match="eps is '1e-6'; .* number, without quotation marks"):
        read_number({"eps": "1e-6"}, "eps")


def test_negative_token_ids_stand_for_no_token():
    assert read_token_ids({"eos_token_id": -1}, "eos_token_id") == ()
    assert read_token_ids({"eos_token_id": [2, -1]}, "eos_token_id") == (2,)


@pytest.mark.parametrize("value", ["2", [2, "3"], [None], 2.5, True, {}])
def test_other_values_are_no_token_ids(value):
    with pytest.raises(ModelConfigError, match="other.json: ids is .*; expected a token id or"):
        read_token_ids({"ids": value}, "ids", file="other.json")


@pytest.mark.parametrize("value", [3, ["3"], [0.5], [True]])
def test_other_values_are_no_layer_numbers(value):
    with pytest.raises(ModelConfigError, match="layers is .*; expected a list of layer numbers"):
        read_layer_numbers({"layers": value}, "layers")


@pytest.mark.parametrize("value", [[], "", 0, False, "linear"])
def test_other_values_are_no_object(value):
    assert read_object({"rope_scaling": None}, "rope_scaling") == {}
    with pytest.raises(ModelConfigError, match="config.json: rope_scaling is .*; expected an obj"):
        read_object({"rope_scaling": value}, "rope_scaling")
