"""DBRX's nested config.json."""

import pytest

from models import read_config
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.dbrx import DbrxConfig

# Sizes of the published model, with fewer of them.
HUB = {
    "architectures": ["DbrxForCausalLM"],
    "vocab_size": 512,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 1024,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 16, "moe_top_k": 4},
}


def test_fields_of_nested_objects_are_read():
    config = read_config(HUB)
    assert isinstance(config, DbrxConfig)
    attention = config.attention[0]
    assert (attention.num_kv_heads, attention.head_dim, attention.rope.theta) == (2, 16, 500_000)
    assert (config.num_experts, config.num_experts_per_tok, config.clip) == (16, 4, 8.0)
    assert (config.moe_intermediate_size, config.normalizes_weights) == (96, True)


def test_a_null_order_of_the_norm_leaves_weights_as_they_are():
    ffn = {**HUB["ffn_config"], "moe_normalize_expert_weights": None}
    assert not read_config({**HUB, "ffn_config": ffn}).normalizes_weights


def test_another_order_of_the_norm_is_refused():
    ffn = {**HUB["ffn_config"], "moe_normalize_expert_weights": 2}
    with pytest.raises(UnsupportedModelError, match="moe_normalize_expert_weights=2"):
        read_config({**HUB, "ffn_config": ffn})


def test_two_different_rope_thetas_are_refused():
    ropes = {"rope_type": "default", "rope_theta": 10_000.0}
    with pytest.raises(ModelConfigError, match="rope_theta"):
        read_config({**HUB, "rope_parameters": ropes})
