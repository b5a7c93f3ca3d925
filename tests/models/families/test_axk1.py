"""The weights of A.X K1: norms under other names, and corrections that the release lacks."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.families.axk1 import AXK1ForCausalLM
from models.registry import read_config

SMALL = {
    "architectures": ["AXK1ForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}


def make_model() -> AXK1ForCausalLM:
    config = read_config(SMALL)
    return nnx.eval_shape(
        lambda: AXK1ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_norms_after_experts_are_stored_at_the_layer():
    rules = make_model().weight_rules()
    norms = {name: rule for name, rule in rules.items() if "post_mlp_layernorm" in name}
    assert {name: rule.sources[0].name for name, rule in norms.items()} == {
        f"layers.{idx}.mlp.post_mlp_layernorm.scale": (
            f"model.layers.{idx}.post_mlp_layernorm.weight"
        )
        for idx in (1, 3)
    }


def test_norms_after_layers_without_experts_are_ignored():
    model = make_model()
    names = [f"model.layers.{idx}.post_mlp_layernorm.weight" for idx in range(4)]
    assert [model.ignores_weight(name) for name in names] == [True, False, True, False]
    assert not model.ignores_weight("model.layers.0.post_attention_layernorm.weight")


def test_corrections_that_a_checkpoint_lacks_are_zeros():
    rule = make_model().weight_rules()["layers.1.mlp.gate.correction_bias"]
    (source,) = rule.sources
    assert source.is_optional
    assert source.name == "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(rule.combined([]), np.zeros(16))
    stored = np.arange(16.0)
    np.testing.assert_array_equal(rule.combined([stored]), stored)


def test_layers_with_experts_are_of_one_kind():
    layers = make_model().layers
    assert kind_of(layers[1]) == kind_of(layers[3]) != kind_of(layers[0])
    assert kind_of(layers[0]) == kind_of(layers[2])
