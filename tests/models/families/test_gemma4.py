"""Gemma 4: shared keys and values, and embeddings per layer, in a loop and in turn; experts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import LoadedModel, load_model
from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.gemma4 import (
    Gemma4ExpertsConfig,
    Gemma4ForCausalLM,
    Gemma4Router,
)
from tests import on_device
from tests.models.steppers import IN_TURN, in_loop
from tests.oracles.paged_stepper import PagedStepper

TOLERANCE = 1e-5  # of the largest absolute logit
SLIDING, FULL = "sliding_attention", "full_attention"
HF_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 64,
    "layer_types": [SLIDING, SLIDING, FULL] * 3,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
    "initializer_range": 0.3,
}


def make_model(**fields: object) -> Gemma4ForCausalLM:
    config = Gemma4ForCausalLM.read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: Gemma4ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def random_model(folder, **fields: object) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | fields))
    model = load_model(folder, dtype="float32", load_format="dummy")
    return dataclasses.replace(model, platform=IN_TURN)


@pytest.mark.parametrize("per_layer_size", [0, 4])
def test_layers_are_of_four_kinds(per_layer_size):
    model = make_model(hidden_size_per_layer_input=per_layer_size)
    kinds = [kind_of(layer) for layer in model.layers]
    # Sliding and full ones with keys and values of their own, and such without.
    first, shared = kinds[:3], kinds[3:]
    assert first[0] == first[1] != first[2]
    assert shared == [shared[0], shared[0], shared[2]] * 2
    assert len(set(kinds)) == 4


# `tests/end_to_end/test_parity.py` compares "gemma4-ple" with transformers in the normal run.
@pytest.mark.slow
@pytest.mark.parametrize("only_last_tokens", [False, True])
def test_logits_of_layers_in_a_loop_equal_layers_in_turn(tmp_path, only_last_tokens):
    model = random_model(tmp_path)
    in_turn, in_a_loop = (
        PagedStepper(each, only_last_tokens=only_last_tokens) for each in (model, in_loop(model))
    )
    rng = np.random.default_rng(0)
    lens = [{0: 20, 1: 7, 2: 1}, {0: 1, 1: 9, 2: 12}, {0: 3, 1: 1}]
    for step in lens:
        chunks = {
            row: rng.integers(32, size=num_tokens).tolist() for row, num_tokens in step.items()
        }
        wanted, got = in_turn.step(chunks), in_a_loop.step(chunks)
        for row in chunks:
            assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


def test_layers_have_the_projections_that_they_need():
    rules = make_model(attention_k_eq_v=True).weight_rules()

    def projections(layer_idx: int) -> list[str]:
        start = f"layers.{layer_idx}.self_attn."
        names = (name.removeprefix(start) for name in rules if name.startswith(start))
        return sorted(name.partition("_")[0] for name in names if name.endswith("_proj.kernel"))

    assert projections(0) == ["k", "o", "q", "v"]
    # Keys are values in full layers; the last six layers have neither.
    assert projections(2) == ["k", "o", "q"]
    assert projections(3) == projections(5) == ["o", "q"]


def test_parameters_have_the_names_of_the_hub():
    rules = make_model().weight_rules()
    names = {
        "layers.0.layer_scalar.scale": "model.layers.0.layer_scalar",
        "layers.0.per_layer_input_gate.kernel": "model.layers.0.per_layer_input_gate.weight",
        "embed_tokens_per_layer.embedding": "model.embed_tokens_per_layer.weight",
    }
    for name, wanted in names.items():
        (source,) = rules[name].sources
        assert source.name == wanted
    assert rules["embed_tokens_per_layer.embedding"].sources[0].shape == (32, 9 * 4)


def test_keys_and_values_of_layers_that_share_may_be_in_a_checkpoint():
    model = make_model()
    assert model.ignores_weight("model.layers.3.self_attn.k_proj.weight")
    assert model.ignores_weight("model.layers.8.self_attn.v_norm.weight")
    assert model.ignores_weight("model.layers.3.self_attn.k_proj.bias")
    assert not model.ignores_weight("model.layers.2.self_attn.k_proj.weight")
    assert not model.ignores_weight("model.layers.3.self_attn.q_proj.weight")


WITH_EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 6,
}


def test_experts_are_read_where_they_are_enabled():
    config = Gemma4ForCausalLM.read_config(HF_CONFIG | WITH_EXPERTS)
    assert config.experts == Gemma4ExpertsConfig(num_experts=4, top_k=2, intermediate_size=6)
    disabled = HF_CONFIG | WITH_EXPERTS | {"enable_moe_block": None}
    assert Gemma4ForCausalLM.read_config(disabled).experts is None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_experts": None}, ModelConfigError, "num_experts is missing"),
        ({"top_k_experts": None}, ModelConfigError, "top_k_experts is missing"),
        ({"moe_intermediate_size": None}, ModelConfigError, "moe_intermediate_size is missing"),
        ({"top_k_experts": 5}, ModelConfigError, "top_k_experts is 5, and num_experts is 4"),
        (
            {"hidden_size_per_layer_input": 4},
            UnsupportedModelError,
            "hidden_size_per_layer_input is 4",
        ),
    ],
)
def test_experts_that_cannot_be_read_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        Gemma4ForCausalLM.read_config(HF_CONFIG | WITH_EXPERTS | fields)


def test_experts_and_their_router_have_the_names_of_the_checkpoint():
    model = make_model(**WITH_EXPERTS)
    rules = model.weight_rules()
    names = {
        "router.proj.kernel": ("router.proj.weight", (4, 16)),
        "router.scale.scale": ("router.scale", (16,)),
        "router.per_expert_scale.scale": ("router.per_expert_scale", (4,)),
        "experts.gate_proj.kernel": ("experts.gate_up_proj", (4, 12, 16)),
        "experts.down_proj.kernel": ("experts.down_proj", (4, 16, 6)),
        "post_feedforward_layernorm_2.scale": ("post_feedforward_layernorm_2.weight", (16,)),
    }
    for name, (of_checkpoint, shape) in names.items():
        (source,) = rules[f"layers.1.{name}"].sources
        assert (source.name, source.shape) == (f"model.layers.1.{of_checkpoint}", shape)
    kinds = [kind_of(layer) for layer in model.layers]
    assert len(set(kinds)) == 4


def test_router_scales_features_before_the_choice_and_experts_after_it():
    config = Gemma4ForCausalLM.read_config(HF_CONFIG | WITH_EXPERTS)
    router = Gemma4Router(config, dtype=jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    x_np = rng.standard_normal((5, 16))
    kernel_np = rng.standard_normal((16, 4))
    feature_scale_np, expert_scale_np = rng.uniform(0.5, 2, 16), rng.uniform(0.5, 2, 4)
    router.proj.kernel.set_value(on_device.array(kernel_np, jnp.float32))
    router.scale.scale.set_value(on_device.array(feature_scale_np, jnp.float32))
    router.per_expert_scale.scale.set_value(on_device.array(expert_scale_np, jnp.float32))

    normed_np = x_np / np.sqrt((x_np**2).mean(axis=1, keepdims=True) + config.rms_norm_eps)
    scores_np = (normed_np * feature_scale_np / np.sqrt(16)) @ kernel_np
    expected_ids = np.argsort(-scores_np, axis=1)[:, :2]
    chosen_np = np.exp(np.take_along_axis(scores_np, expected_ids, axis=1))
    expected = chosen_np / chosen_np.sum(axis=1, keepdims=True) * expert_scale_np[expected_ids]
    expert_ids, weights = jax.jit(lambda x: router(x))(on_device.array(x_np, jnp.float32))
    np.testing.assert_array_equal(expert_ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
