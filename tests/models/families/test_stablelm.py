"""StableLM's layers are of one kind, and its parameters are found under the names of the hub."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.families.stablelm import StableLmForCausalLM

HF_CONFIG = {
    "architectures": ["StableLmForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}


def make_model(**fields: object) -> StableLmForCausalLM:
    config = StableLmForCausalLM.read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: StableLmForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


@pytest.mark.parametrize("flag", [False, True])
def test_layers_may_run_in_a_loop(flag):
    model = make_model(qk_layernorm=flag, use_parallel_residual=flag, use_qkv_bias=flag)
    first, second = model.layers
    assert kind_of(first) == kind_of(second)


def test_norms_of_heads_have_the_names_of_the_hub():
    rules = make_model(qk_layernorm=True).weight_rules()
    names = [source.name for source in rules["layers.1.self_attn.k_norm.scale"].sources]
    prefix = "model.layers.1.self_attn.k_layernorm.norms"
    assert names == [f"{prefix}.0.weight", f"{prefix}.1.weight"]
    (bias,) = rules["layers.1.post_attention_layernorm.bias"].sources
    assert bias.name == "model.layers.1.post_attention_layernorm.bias"


def test_a_parallel_layer_has_one_norm():
    rules = make_model(use_parallel_residual=True).weight_rules()
    norms = [name for name in rules if "norm" in name]
    assert sorted(norms) == [
        "layers.0.input_layernorm.bias",
        "layers.0.input_layernorm.scale",
        "layers.1.input_layernorm.bias",
        "layers.1.input_layernorm.scale",
        "norm.bias",
        "norm.scale",
    ]
