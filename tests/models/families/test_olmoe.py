"""OLMoE's config.json."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import UnsupportedModelError
from models.families.olmoe import OlmoeForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
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
        {"num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2},
        {"num_local_experts": 8, "norm_topk_prob": True, "attention_bias": True},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "eos_token_id": None},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "OlmoeConfig"))
    assert read_config(hf_config) == wanted


def test_defaults_by_hand():
    config = read_config(HF_CONFIG)
    assert (config.num_experts, config.num_experts_per_tok) == (64, 8)
    assert (config.moe_intermediate_size, config.normalizes_weights) == (8, False)
    assert (config.rms_norm_eps, config.eos_token_ids) == (1e-5, (50279,))
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.rope.theta) == (8, 1e4)
    assert (layer.qkv_bias, layer.out_bias) == (False, False)


@pytest.mark.parametrize(("name", "value"), [("clip_qkv", 8.0), ("sliding_window", 16)])
def test_what_is_not_computed_is_refused(name, value):
    with pytest.raises(UnsupportedModelError, match=f"{name}={value} is not supported"):
        read_config(HF_CONFIG | {name: value})


def test_norms_span_all_heads_and_layers_may_run_in_a_loop():
    config = read_config(HF_CONFIG | {"num_key_value_heads": 2, "num_experts": 8})
    model = nnx.eval_shape(
        lambda: OlmoeForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    rules = model.weight_rules()
    for name, width in (("q_norm", 64), ("k_norm", 16)):
        (source,) = rules[f"layers.1.self_attn.{name}.scale"].sources
        assert (source.name, source.shape) == (f"model.layers.1.self_attn.{name}.weight", (width,))
    first, second = model.layers
    assert kind_of(first) == kind_of(second)
