"""Mixtral's config.json, and the names of its weights."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import UnsupportedModelError
from models.families.mixtral import MixtralForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
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
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 16},
        {"num_experts": 4, "num_key_value_heads": 4, "rope_theta": 1e4, "eos_token_id": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "head_dim": 16},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "MixtralConfig"))
    assert read_config(hf_config) == wanted


def test_defaults_by_hand():
    config = read_config(HF_CONFIG)
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert (config.moe_intermediate_size, config.rms_norm_eps) == (8, 1e-5)
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.rope.theta, layer.sliding_window) == (8, 1e6, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.has_experts == (True, True)


def test_layers_of_different_windows_are_refused():
    types = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(
        UnsupportedModelError, match="layer_types=.* does not fit sliding_window=16"
    ):
        read_config(HF_CONFIG | types)


def test_weights_have_the_names_of_the_hub_and_layers_may_run_in_a_loop():
    config = dataclasses.replace(read_config(HF_CONFIG), num_experts=3)
    model = nnx.eval_shape(
        lambda: MixtralForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    rules = model.weight_rules()
    block = "model.layers.1.block_sparse_moe"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        sources = rules[f"layers.1.mlp.experts.{ours}_proj.kernel"].sources
        names = [source.name for source in sources]
        assert names == [f"{block}.experts.{expert}.{theirs}.weight" for expert in range(3)]
    (gate,) = rules["layers.1.mlp.gate.kernel"].sources
    assert (gate.name, gate.shape) == (f"{block}.gate.weight", (3, 64))
    first, second = model.layers
    assert kind_of(first) == kind_of(second)
