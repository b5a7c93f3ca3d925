"""Muse Spark's config.json, the names of its weights, and which layers are alike."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import UnsupportedModelError
from models.families.muse_spark import MuseSparkForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["MuseSparkForCausalLM"],
    "model_type": "muse_spark_text",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_hidden_size": 24,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"num_local_experts": 8, "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "gelu"},
        {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "attention_bias": True},
        {"residual_gate_temperature": 1.0, "routed_scaling_factor": 2.5, "post_norm_eps": 1e-6},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "output_multiplier": 0.5},
        {"layer_rope_theta": [0, 1, 0, 2], "sliding_window": 64, "qk_scale_factor": 2.0},
        {"moe_hidden_size": 32, "moe_intermediate_size": 16, "final_logit_softcapping": 3.0},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    wanted = read_config(as_transformers_reads_it(HF_CONFIG | fields, "MuseSparkTextConfig"))
    assert read_config(HF_CONFIG | fields) == wanted
    assert wanted != read_config(HF_CONFIG)


def test_a_tied_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings=True is not supported"):
        read_config(HF_CONFIG | {"tie_word_embeddings": True})


def make_model(**fields: object) -> MuseSparkForCausalLM:
    config = read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: MuseSparkForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("bfloat16"))
    )


def test_layers_that_differ_in_weights_only_may_run_in_a_loop():
    kinds = [kind_of(layer) for layer in make_model().layers]
    assert kinds[0] == kinds[1] == kinds[2] != kinds[3]


def test_names_and_dtypes_of_weights():
    model = make_model(num_hidden_layers=1)
    rules = model.weight_rules()
    sources = {source.name: source.shape for rule in rules.values() for source in rule.sources}
    layer = "model.layers.0"
    assert sources[f"{layer}.mlp.experts.gate_up_proj"] == (4, 16, 24)
    assert sources[f"{layer}.mlp.experts.post_expert_norm.weight"] == (24,)
    assert sources[f"{layer}.mlp.pre_expert_proj.weight"] == (24, 64)
    assert sources[f"{layer}.post_feedforward_residual_gate.gate"] == (64,)
    assert f"{layer}.post_attention_layernorm.weight" not in sources
    assert model.layers[0].post_attention_residual_gate.gate.get_value().dtype == jnp.float32
    assert model.layers[0].mlp.gate.kernel.get_value().dtype == jnp.float32
