"""Qwen2-MoE's config.json, and the names of its weights."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError
from models.families.qwen2_moe import Qwen2MoeForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 4, "qkv_bias": False},
        {"norm_topk_prob": True, "moe_intermediate_size": 8, "decoder_sparse_step": 2},
        {"mlp_only_layers": [3], "shared_expert_intermediate_size": 16, "rope_theta": 1e6},
        {"use_sliding_window": True, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 16},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "Qwen2MoeConfig"))
    assert read_config(hf_config) == wanted


def test_defaults_by_hand():
    config = read_config(HF_CONFIG)
    assert (config.num_experts, config.num_experts_per_tok) == (60, 4)
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (1408, 5632)
    assert (config.normalizes_weights, config.has_experts) == (False, (True,) * 4)
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.qkv_bias, layer.out_bias) == (16, True, False)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [None] * 4),
        ({"use_sliding_window": True}, [16, None, 16, None]),
        ({"use_sliding_window": True, "max_window_layers": 1}, [16, None, None, None]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
    ],
)
def test_every_second_of_the_first_layers_has_the_window(fields, windows):
    config = read_config(HF_CONFIG | {"sliding_window": 16} | fields)
    assert [layer.sliding_window for layer in config.attention] == windows


def test_sliding_layers_without_a_window_are_refused():
    with pytest.raises(ModelConfigError, match="layer_types has sliding layers"):
        read_config(HF_CONFIG | {"layer_types": ["sliding_attention"] * 4})


def test_layers_with_experts_are_of_one_kind_and_have_the_names_of_the_hub():
    sizes = {"num_experts": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40}
    config = read_config(HF_CONFIG | sizes)
    model = nnx.eval_shape(
        lambda: Qwen2MoeForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    assert kind_of(model.layers[1]) == kind_of(model.layers[2]) != kind_of(model.layers[0])
    rules = model.weight_rules()
    shapes = {
        source.name: source.shape
        for rule in rules.values()
        for source in rule.sources
        if ".1.mlp." in source.name and "experts." not in source.name
    }
    assert shapes == {
        "model.layers.1.mlp.gate.weight": (4, 64),
        "model.layers.1.mlp.shared_expert.gate_proj.weight": (40, 64),
        "model.layers.1.mlp.shared_expert.up_proj.weight": (40, 64),
        "model.layers.1.mlp.shared_expert.down_proj.weight": (64, 40),
        "model.layers.1.mlp.shared_expert_gate.weight": (1, 64),
    }
