"""ZAYA1's config.json, the names of its weights, which layers are alike, and its float32 stream."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.zaya import ZayaForCausalLM
from models.layers.shifted_factors import ScaledSum
from models.registry import read_config
from tests import on_device

HF_CONFIG = {
    "architectures": ["ZayaForCausalLM"],
    "model_type": "zaya",
    "vocab_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "router_hidden_size": 24,
    "head_dim": 16,
}


def make_model(**fields: object) -> ZayaForCausalLM:
    config = read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: ZayaForCausalLM(config, has_head_kernel=False, dtype=jnp.dtype("bfloat16"))
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, "expected a list of 3 names"),
        ({"layer_types": ["hybrid", "hybrid_sliding", "hybrid"]}, "sliding_window is null"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "no rope_theta for hybrid"),
        ({"cca_time1": 1}, "cca_time1 is 1; expected an integer of at least 2"),
    ],
)
def test_fields_that_contradict_each_other_are_named(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        read_config(HF_CONFIG | fields)


@pytest.mark.parametrize("fields", [{"num_experts_per_tok": 2}, {"lm_head_bias": True}])
def test_options_that_are_not_computed_are_refused(fields):
    (name,) = fields
    with pytest.raises(UnsupportedModelError, match=f"{name}=.* is not supported"):
        read_config(HF_CONFIG | fields)


def test_the_kind_of_the_rotary_embedding_beside_those_of_layer_types_is_ignored():
    """The hub's `rope_parameters` has an object per layer type, and also a `rope_type`."""
    ropes = {"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "rope_type": "default"}
    (layer,) = set(read_config(HF_CONFIG | {"rope_parameters": ropes}).attention)
    assert (layer.rope.theta, layer.rotary_dim) == (1e4, 4)


def test_layers_that_differ_in_weights_only_may_run_in_a_loop():
    """No router is before the first layer, so checkpoints have no state scale for it."""
    model = make_model(layer_types=["hybrid", "hybrid", "hybrid_sliding"], sliding_window=64)
    kinds = [kind_of(layer) for layer in model.layers]
    assert kinds[0] == kinds[1] != kinds[2]
    name = "mlp.gate.router_states_scale"
    rules = model.weight_rules()
    assert rules[f"layers.0.{name}.scale"].combined([]).tolist() == [1.0] * 24
    (source,) = rules[f"layers.1.{name}.scale"].sources
    assert (source.name, source.shape) == (f"model.layers.1.{name}", (24,))


def test_corrections_of_experts_are_float32():
    router = make_model().layers[0].mlp.gate
    assert router.correction_bias.get_value().dtype == jnp.float32
    assert router.correction_bias.get_value().shape == (5,)  # and the choice of no expert


def test_the_residual_stream_is_not_rounded_to_the_dtype_of_outputs():
    total = ScaledSum(2, dtype=jnp.dtype("bfloat16"))
    total.residual.bias[...] = on_device.array([0.0, 1.0], jnp.bfloat16)
    total.hidden_states.scale[...] = on_device.array([2.0, 1.0], jnp.bfloat16)
    stream = np.array([[1.0 + 2.0**-20, 3.0 + 2.0**-20]], np.float32)
    out = total(on_device.array(stream), on_device.array([[0.5, 0.25]], jnp.bfloat16))
    np.testing.assert_array_equal(out, stream + np.array([[1.0, 1.25]], np.float32))
