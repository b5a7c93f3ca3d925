"""The fields of config.json that say where experts are, how many, and how large."""

import pytest

from models.config.moe_config import (
    MoEConfig,
    read_expert_fields,
    read_group_fields,
    read_leading_dense,
    read_sparse_steps,
)
from models.errors import ModelConfigError, UnsupportedModelError
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SIZES = {
    "vocab_size": 400,
    "hidden_size": 160,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "max_position_embeddings": 8192,
}
# Architecture -> its configuration class in transformers, and fields that have no default.
FAMILIES = {
    "AfmoeForCausalLM": ("AfmoeConfig", {}),
    "AXK1ForCausalLM": ("AXK1Config", {"num_key_value_heads": 40}),
    "AXK2ForCausalLM": ("AXK2Config", {"num_key_value_heads": 40, "head_dim": 32}),
    "BeamForCausalLM": ("BeamConfig", {"n_group": 1, "topk_group": 1}),
    "Cohere2MoeForCausalLM": ("Cohere2MoeConfig", {}),
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config",
        {"num_key_value_heads": 40, "num_experts_per_tok": 2},
    ),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {"num_key_value_heads": 40}),
    "DeepseekV32ForCausalLM": ("DeepseekV32Config", {"num_key_value_heads": 40, "head_dim": 64}),
    "Dots1ForCausalLM": (
        "Dots1Config",
        {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    ),
    "Ernie4_5_MoeForCausalLM": ("Ernie4_5_MoeConfig", {}),
    "ExaoneMoeForCausalLM": ("ExaoneMoeConfig", {}),
    "FlexOlmoForCausalLM": ("FlexOlmoConfig", {}),
    "FlintForCausalLM": ("FlintConfig", {}),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {}),
    "Glm4MoeLiteForCausalLM": (
        "Glm4MoeLiteConfig",
        # Another name of `qk_rope_head_dim` in transformers.
        {"num_key_value_heads": 40, "head_dim": 64},
    ),
    "GlmMoeDsaForCausalLM": ("GlmMoeDsaConfig", {"num_key_value_heads": 40, "head_dim": 64}),
    "GptOssForCausalLM": ("GptOssConfig", {}),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", {}),
    "GraniteMoeSWAForCausalLM": ("GraniteMoeSWAConfig", {}),
    "HunYuanMoEV1ForCausalLM": ("HunYuanMoEV1Config", {}),
    "HYV3ForCausalLM": ("HYV3Config", {}),
    "InklingForCausalLM": ("InklingTextConfig", {}),
    "JetMoeForCausalLM": ("JetMoeConfig", {}),
    "Kolibri1ForCausalLM": ("Kolibri1Config", {}),
    "LagunaForCausalLM": ("LagunaConfig", {}),
    "Llama4ForCausalLM": ("Llama4TextConfig", {}),
    "LongcatFlashForCausalLM": (
        "LongcatFlashConfig",
        {"num_key_value_heads": 40, "head_dim": 64},
    ),
    "MellumForCausalLM": ("MellumConfig", {}),
    "MiniMaxM2ForCausalLM": ("MiniMaxM2Config", {}),
    "Mistral4ForCausalLM": ("Mistral4Config", {"num_key_value_heads": 40}),
    "MistralLarge4ForCausalLM": (
        "MistralLarge4TextConfig",
        {"num_key_value_heads": 40, "head_dim": 64},
    ),
    "MixtralForCausalLM": ("MixtralConfig", {}),
    "MuseSparkForCausalLM": ("MuseSparkTextConfig", {}),
    "OlmoeForCausalLM": ("OlmoeConfig", {}),
    "PhimoeForCausalLM": ("PhimoeConfig", {"lm_head_bias": True}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {"head_dim": 8}),
    "SarvamMLAForCausalLM": ("SarvamMLAConfig", {"num_key_value_heads": 40}),
    "SolarOpenForCausalLM": ("SolarOpenConfig", {}),
    "Step3p5ForCausalLM": ("Step3p7TextConfig", {}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_left_out_have_transformers_defaults(architecture):
    config_class, fields = FAMILIES[architecture]
    hf_config = {"architectures": [architecture], **SIZES, **fields}
    theirs = as_transformers_reads_it(hf_config, config_class)
    ours = read_config(hf_config | {"model_type": theirs["model_type"]})
    assert isinstance(ours, MoEConfig)
    assert ours == read_config(theirs)


def read(hf_config: dict[str, object], **more: object) -> dict[str, int]:
    defaults = {"default_num_experts": 8, "default_top_k": 2, "default_size": 48}
    return read_expert_fields(hf_config, **defaults | more)


def test_missing_and_null_fields_are_the_defaults():
    wanted = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    assert read({}) == wanted
    assert read(dict.fromkeys(["num_experts", "num_experts_per_tok"])) == wanted


def test_both_spellings_of_ernies_expert_fields_mean_the_same():
    config = {"architectures": ["Ernie4_5_MoeForCausalLM"], **SIZES}
    own = read_config({**config, "moe_num_experts": 8, "moe_k": 2})
    assert (own.num_experts, own.num_experts_per_tok, own.choose.top_k) == (8, 2, 2)
    assert own == read_config({**config, "num_experts": 8, "num_experts_per_tok": 2})


def test_ernie_with_a_bias_of_the_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="use_bias=True"):
        read_config({"architectures": ["Ernie4_5_MoeForCausalLM"], **SIZES, "use_bias": True})


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
        ({"num_experts": 0}, "num_experts is 0; expected a positive integer"),
        (
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3, and num_local_experts is 2",
        ),
        (
            {"num_experts": 4, "num_local_experts": 8},
            "num_experts is 4, and num_local_experts is 8; both name the same field",
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


@pytest.mark.parametrize(
    ("num_dense", "wanted"), [(None, [False, True, True]), (0, [True] * 3), (5, [False] * 3)]
)
def test_first_layers_are_dense(num_dense, wanted):
    hf_config = {"first_k_dense_replace": num_dense}
    assert read_leading_dense(hf_config, 3, default=1) == tuple(wanted)


def read_groups(num_experts: int, top_k: int, **hf_config: int) -> dict[str, int]:
    return read_group_fields(hf_config, num_experts=num_experts, top_k=top_k)


def test_groups_of_experts():
    assert read_groups(8, 2) == {"num_groups": 1, "num_kept_groups": 1}
    # As many experts in the kept groups as are chosen, and two in each group.
    assert read_groups(8, 4, n_group=4, topk_group=2) == {"num_groups": 4, "num_kept_groups": 2}


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "num_kept"),
    [(8, 1, 3, 1), (8, 1, 2, 3), (8, 5, 4, 2), (8, 1, 8, 1)],
)
def test_groups_that_do_not_fit_are_named(num_experts, top_k, num_groups, num_kept):
    message = f"n_group={num_groups} and topk_group={num_kept} do not fit {num_experts} experts"
    with pytest.raises(ModelConfigError, match=message):
        read_groups(num_experts, top_k, n_group=num_groups, topk_group=num_kept)
