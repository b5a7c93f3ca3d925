"""Doge: the longest requests, names of weights, and checkpoints that are refused."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.errors import UnsupportedModelError
from models.families.doge import DogeForCausalLM
from models.registry import read_config
from paxkv.errors import ConfigError
from paxkv.runner.memory.max_model_len import find_max_model_len

HF_CONFIG = {
    "architectures": ["DogeForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 2048),
        ({"keep_window_size": 8192}, 4096),
        ({"keep_window_size": 100}, 100),
        ({"rope_scaling": DYNAMIC}, 2048),
        ({"rope_scaling": DYNAMIC, "keep_window_size": 8192}, 8192),
    ],
)
def test_requests_are_limited_to_the_lengths_that_are_computed(fields, limit):
    config = read_config(HF_CONFIG | fields)
    assert find_max_model_len(None, config) == find_max_model_len(limit, config) == limit
    with pytest.raises(ConfigError, match=f"more than the {limit} positions that the model has"):
        find_max_model_len(limit + 1, config)
    assert find_max_model_len(None, config.for_length(None)) == limit


def test_rotary_embedding_is_scaled_from_the_length_in_config_json():
    config = read_config(HF_CONFIG | {"rope_scaling": DYNAMIC, "keep_window_size": 100})
    assert config.attention[0].rope.original_max_position_embeddings == 4096


def test_checkpoints_with_experts_are_refused():
    with pytest.raises(UnsupportedModelError, match="is_moe=true .* outputs for other tokens"):
        read_config(HF_CONFIG | {"is_moe": True})


def test_weights_have_the_names_of_checkpoints():
    config = read_config(HF_CONFIG | {"attention_bias": True})
    model = nnx.eval_shape(
        lambda: DogeForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    rules = model.weight_rules()
    names = {source.name: source.shape for rule in rules.values() for source in rule.sources}
    assert names["model.layers.1.self_attn.A"] == (2,)
    assert names["model.layers.1.self_attn.dt_proj.weight"] == (2, 16)
    assert names["model.layers.1.self_attn.dt_proj.bias"] == (2,)
    assert names["model.layers.1.self_attn.q_norm.weight"] == (8,)
    assert names["model.layers.1.input_residual"] == (64,)
    assert names["model.layers.1.post_attention_residual"] == (64,)
