"""The config.json of Mistral 4, and the names of its weights."""

import math

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.mistral4 import Mistral4ForCausalLM
from models.layers.attention_variants import QueryScale
from models.layers.latent_variants import ScaledQueriesLatentAttention
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
ROPE = {
    "type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.2,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
        {"rope_parameters": ROPE},
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
        {"num_local_experts": 16, "n_shared_experts": 2, "first_k_dense_replace": 2},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    theirs = as_transformers_reads_it(hf_config, "Mistral4Config")
    assert read_config(hf_config) == read_config(theirs)


def test_sizes_by_hand():
    config = read_config(HF_CONFIG)
    (layer, *_) = config.attention
    assert (layer.q_latent_dim, layer.latent_dim) == (1024, 256)
    assert (layer.nope_dim, layer.rotary_dim, layer.value_head_dim) == (64, 64, 128)
    assert layer.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2, rel=1e-12)
    assert config.query_scale == QueryScale(weight=0.1, period=8192, offset=0)
    assert read_config(HF_CONFIG | {"q_lora_rank": None}).attention[0].q_latent_dim is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 with num_attention_heads=8"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope type 'default' is not supported"),
        (
            {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25 is not supported for heads of 128 dimensions",
        ),
    ],
)
def test_other_models_are_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(HF_CONFIG | fields)


def test_a_group_has_two_experts_or_more():
    with pytest.raises(ModelConfigError, match="n_group=128 and topk_group=4 do not fit 128"):
        read_config(HF_CONFIG | {"n_group": 128, "topk_group": 4})


def make_model(**fields: object) -> Mistral4ForCausalLM:
    small = {"n_routed_experts": 4, "moe_intermediate_size": 3, "first_k_dense_replace": 2}
    config = read_config(HF_CONFIG | small | fields)
    return nnx.eval_shape(
        lambda: Mistral4ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_queries_have_a_factor_if_config_json_sets_one():
    plain = {name: value for name, value in ROPE.items() if name != "llama_4_scaling_beta"}
    for rope, has_factor in ((ROPE, True), (plain, False)):
        attention = make_model(rope_parameters=rope).layers[0].self_attn
        assert isinstance(attention, ScaledQueriesLatentAttention) == has_factor


def test_layers_with_experts_are_of_one_kind():
    layers = make_model().layers
    assert kind_of(layers[0]) == kind_of(layers[1]) != kind_of(layers[2]) == kind_of(layers[3])


def test_experts_of_a_layer_are_packed():
    sources = {
        source.name: source.shape
        for name, rule in make_model().weight_rules().items()
        if name.startswith("layers.2.mlp.experts.")
        for source in rule.sources
    }
    assert sources == {
        "model.layers.2.mlp.experts.gate_up_proj": (4, 6, 64),
        "model.layers.2.mlp.experts.down_proj": (4, 64, 3),
    }
