"""MiniMax-M2's config.json, and the names of its weights."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import UnsupportedModelError
from models.families.minimax_m2 import MiniMaxM2ForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_local_experts": 8, "num_experts_per_tok": 1, "num_key_value_heads": 4},
        {"num_experts": 8, "head_dim": 32, "rope_theta": 1e4, "eos_token_id": None},
        {"rotary_dim": 64},
        {"rotary_dim": 64, "partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "MiniMaxM2Config"))
    assert read_config(hf_config) == wanted


def test_defaults_by_hand():
    config = read_config(HF_CONFIG)
    assert (config.num_experts, config.num_experts_per_tok) == (256, 8)
    assert (config.moe_intermediate_size, config.rms_norm_eps) == (8, 1e-6)
    assert (config.bos_token_id, config.eos_token_ids) == (200034, (200020,))
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.rotary_dim) == (8, 128, 128)
    assert (layer.rope.theta, layer.qkv_bias) == (5e6, False)
    assert read_config(HF_CONFIG | {"rotary_dim": 64}).attention[0].rotary_dim == 64


HUB = {
    "attn_type_list": [1, 1],
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "sliding_window": None,
}


def test_fields_that_only_the_hub_writes_change_nothing():
    assert read_config(HF_CONFIG | HUB) == read_config(HF_CONFIG)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_type_list", [1, 0]),
        ("use_qk_norm", False),
        ("qk_norm_type", "per_head"),
        ("scoring_func", "softmax"),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 8),
        ("layernorm_full_attention_beta", 2.0),
        ("layernorm_mlp_beta", 2.0),
        ("sliding_window", 16),
    ],
)
def test_fields_of_another_model_are_refused(name, value):
    with pytest.raises(UnsupportedModelError, match=f"{name}=.* is not supported"):
        read_config(HF_CONFIG | HUB | {name: value})


def test_weights_have_the_names_of_the_hub_and_layers_may_run_in_a_loop():
    config = read_config(HF_CONFIG | {"num_local_experts": 8, "num_key_value_heads": 4})
    model = nnx.eval_shape(
        lambda: MiniMaxM2ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("bfloat16"))
    )
    rules = model.weight_rules()
    block = "model.layers.1.block_sparse_moe"
    (correction,) = rules["layers.1.mlp.gate.correction_bias"].sources
    assert (correction.name, correction.shape) == (f"{block}.e_score_correction_bias", (8,))
    (gate,) = rules["layers.1.mlp.gate.kernel"].sources
    assert gate.name == f"{block}.gate.weight"
    down = rules["layers.1.mlp.experts.down_proj.kernel"].sources
    assert down[7].name == f"{block}.experts.7.w2.weight"
    (norm,) = rules["layers.1.self_attn.k_norm.scale"].sources
    assert norm.shape == (4 * 128,)
    first, second = model.layers
    assert kind_of(first) == kind_of(second)
    assert first.mlp.gate.correction_bias.get_value().dtype == jnp.float32
