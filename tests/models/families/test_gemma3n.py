"""Gemma 3n: its config.json, its kinds of layers, and the names of its weights."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.gemma3n import Gemma3nForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SLIDING, FULL = "sliding_attention", "full_attention"
HF_CONFIG = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 300_000,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 10, "num_kv_shared_layers": 0},
        {"intermediate_size": list(range(8, 28)), "altup_num_inputs": 3, "altup_active_idx": 1},
        {"layer_types": [SLIDING, FULL] * 10, "sliding_window": 64, "num_kv_shared_layers": 4},
        {"activation_sparsity_pattern": [0.5] + [0.0] * 19, "laurel_rank": 8},
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
        {"altup_correct_scale": False, "final_logit_softcapping": 20.0, "head_dim": 8},
        {"rope_local_base_freq": 5e3, "rope_theta": 5e5, "attention_bias": True},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "Gemma3nTextConfig"))
    assert read_config(hf_config) == wanted


def make_model(**fields: object) -> Gemma3nForCausalLM:
    config = read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: Gemma3nForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_layers_of_the_default_are_of_six_kinds():
    model = make_model()
    found = [kind_of(layer) for layer in model.layers]
    # By default, ten layers have sparse gates, every fifth layer is full, and the last 15 layers
    # read the keys and values of layers 3 and 4.
    owners = [layer.kv_layer_idx for layer in model.config.attention]
    assert owners == [None] * 5 + [3, 3, 3, 3, 4] * 3
    assert [found.index(kind) for kind in found] == (
        [0, 0, 0, 0, 4] + [5, 5, 5, 5, 9] + [10, 10, 10, 10, 14] * 2
    )


def test_weights_have_the_names_of_the_checkpoint():
    rules = make_model().weight_rules()
    names = {
        "layers.1.altup.correct_output_scale.scale": "model.layers.1.altup.correct_output_scale",
        "layers.1.altup.prediction_coefs.kernel": "model.layers.1.altup.prediction_coefs.weight",
        "layers.1.laurel.linear_left.kernel": "model.layers.1.laurel.linear_left.weight",
        "altup_projections.2.kernel": "model.altup_projections.2.weight",
        "embed_tokens_per_layer.embedding": "model.embed_tokens_per_layer.weight",
    }
    for name, stored in names.items():
        assert [source.name for source in rules[name].sources] == [stored]
    assert "layers.5.self_attn.k_proj.kernel" not in rules
    assert make_model().ignores_weight("model.layers.5.self_attn.k_proj.weight")
    assert not make_model().ignores_weight("model.layers.4.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"intermediate_size": [8, 8]}, ModelConfigError, "one number for each of 20 layers"),
        ({"activation_sparsity_pattern": [1.0] * 20}, ModelConfigError, "from 0 to below 1"),
        ({"altup_active_idx": 4}, ModelConfigError, "altup_num_inputs is 4"),
        ({"num_kv_shared_layers": 17}, ModelConfigError, r"\(full_attention\)"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping=50"),
    ],
)
def test_fields_that_are_not_computed_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        read_config(HF_CONFIG | fields)
