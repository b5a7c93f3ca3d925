"""MiMo-V2: narrow values, and sinks where the hub has them."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.chosen_layer import kind_of
from models.families.mimo_v2 import MiMoV2FlashForCausalLM

HF_CONFIG = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense"] * 4,
}


@pytest.fixture(scope="module")
def model() -> MiMoV2FlashForCausalLM:
    config = MiMoV2FlashForCausalLM.read_config(HF_CONFIG)
    return nnx.eval_shape(
        lambda: MiMoV2FlashForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_layers_of_one_type_may_run_in_a_loop(model):
    kinds = [kind_of(layer) for layer in model.layers]
    assert kinds[0] == kinds[3] != kinds[1] == kinds[2]


def test_sinks_of_sliding_layers_have_the_name_of_the_hub(model):
    rules = model.weight_rules()
    assert [name for name in rules if "sinks" in name] == [
        "layers.1.self_attn.sinks",
        "layers.2.self_attn.sinks",
    ]
    (source,) = rules["layers.2.self_attn.sinks"].sources
    assert source.name == "model.layers.2.self_attn.attention_sink_bias"
    assert rules["layers.2.self_attn.sinks"].axes == ("heads",)


def test_values_and_the_output_are_narrower_than_keys(model):
    rules = model.weight_rules()
    shapes = {
        name: rules[f"layers.1.self_attn.{name}_proj.kernel"].sources[0].shape for name in "qkvo"
    }
    assert shapes == {"q": (48, 16), "k": (48, 16), "v": (32, 16), "o": (16, 32)}


def test_layers_that_predict_further_tokens_may_be_in_a_checkpoint(model):
    assert model.ignores_weight("model.mtp.layers.0.eh_proj.weight")
    assert not model.ignores_weight("model.layers.0.eh_proj.weight")
