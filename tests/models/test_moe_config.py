"""The fields of config.json that say where experts are, how many, and how large."""

import pytest

from models.errors import ModelConfigError
from models.moe_config import read_expert_fields, read_sparse_steps


def read(hf_config: dict[str, object], **more: object) -> dict[str, int]:
    defaults = {"default_num_experts": 8, "default_top_k": 2, "default_size": 48}
    return read_expert_fields(hf_config, **defaults | more)


def test_missing_and_null_fields_are_the_defaults():
    wanted = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    assert read({}) == wanted
    assert read(dict.fromkeys(["num_experts", "num_experts_per_tok"])) == wanted


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_are_counted_under_both_names(name):
    assert read({name: 4})["num_experts"] == 4


def test_a_family_may_name_its_fields():
    names = ("n_routed_experts",)
    hf_config = {"n_routed_experts": 4, "num_experts": 3, "intermediate_size": 16}
    fields = read(hf_config, num_experts_fields=names, size_field="intermediate_size")
    assert (fields["num_experts"], fields["moe_intermediate_size"]) == (4, 16)


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; wanted a positive integer"),
        (
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3, and num_local_experts is 2",
        ),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size is 'x'"),
    ],
)
def test_malformed_field_is_named(hf_config, message):
    with pytest.raises(ModelConfigError, match=message):
        read(hf_config)


def test_the_size_of_an_expert_may_have_no_default():
    with pytest.raises(ModelConfigError, match="moe_intermediate_size is missing"):
        read({}, default_size=None)


@pytest.mark.parametrize(
    ("hf_config", "wanted"),
    [
        ({}, [True, True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True]),
        ({"mlp_only_layers": None}, [True, True, True, True]),
    ],
)
def test_layers_with_experts(hf_config, wanted):
    assert read_sparse_steps(hf_config, 4) == tuple(wanted)


def test_dense_layers_are_numbers():
    with pytest.raises(ModelConfigError, match="mlp_only_layers is"):
        read_sparse_steps({"mlp_only_layers": ["0"]}, 4)
