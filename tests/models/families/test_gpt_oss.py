"""gpt-oss: its config.json, packed experts with biases, and the bounds of its activation."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config.rope_config import RopeConfig
from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.gpt_oss import ClampedExperts, GptOssForCausalLM

HF_CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}


def test_fields_left_out_have_transformers_defaults():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GptOssConfig(num_hidden_layers=4, num_attention_heads=8, hidden_size=8)
    config = GptOssForCausalLM.read_config(HF_CONFIG)
    full = config.attention[1]
    assert config.num_experts == theirs.num_local_experts
    assert config.num_experts_per_tok == theirs.num_experts_per_tok
    assert config.moe_intermediate_size == HF_CONFIG["intermediate_size"]
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert (config.swiglu_alpha, config.swiglu_limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (full.head_dim, full.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert full.qkv_bias == full.out_bias == theirs.attention_bias
    assert all(layer.has_sinks for layer in config.attention)
    windows = [
        theirs.sliding_window if layer_type == "sliding_attention" else None
        for layer_type in theirs.layer_types
    ]
    assert [layer.sliding_window for layer in config.attention] == windows
    ropes = theirs.rope_parameters
    assert full.rope == RopeConfig(
        kind="yarn",
        theta=ropes["rope_theta"],
        factor=ropes["factor"],
        original_max_position_embeddings=ropes["original_max_position_embeddings"],
        beta_fast=ropes["beta_fast"],
        beta_slow=ropes["beta_slow"],
        truncate=ropes["truncate"],
    )


def test_hub_and_transformers_5_spell_the_same_model():
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    of_hub = HF_CONFIG | {"num_local_experts": 4, "rope_theta": 2e5, "rope_scaling": yarn}
    of_5 = HF_CONFIG | {"num_experts": 4, "rope_parameters": yarn | {"rope_theta": 2e5}}
    config = GptOssForCausalLM.read_config(of_hub)
    assert config == GptOssForCausalLM.read_config(of_5)
    assert (config.num_experts, config.attention[0].rope.theta) == (4, 2e5)
    assert config.attention[0].rope.factor == 4.0


def test_null_sizes_of_heads_follow_from_others():
    config = GptOssForCausalLM.read_config(
        HF_CONFIG | {"hidden_size": 16, "head_dim": None, "num_key_value_heads": None}
    )
    assert (config.attention[0].head_dim, config.attention[0].num_kv_heads) == (2, 8)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_local_experts": 2}, ModelConfigError, "num_experts_per_tok is 4, and num_local"),
        ({"swiglu_limit": 0}, ModelConfigError, "swiglu_limit is 0; expected a positive number"),
        ({"swiglu_alpha": "1"}, ModelConfigError, "swiglu_alpha is '1'"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, "hidden_act='relu6' is not supported"),
    ],
)
def test_fields_that_cannot_be_read_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        GptOssForCausalLM.read_config(HF_CONFIG | fields)


@pytest.fixture(scope="module")
def model() -> GptOssForCausalLM:
    config = GptOssForCausalLM.read_config(HF_CONFIG | {"num_local_experts": 4})
    return nnx.eval_shape(
        lambda: GptOssForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_layers_of_one_type_may_run_in_a_loop(model):
    kinds = [kind_of(layer) for layer in model.layers]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]


def test_biases_of_gate_and_up_take_turns_in_the_checkpoint(model):
    rules = model.weight_rules()
    packed_np = np.arange(4 * 12).reshape(4, 12)
    owner = "layers.2.mlp.experts"
    for start, local in enumerate(("gate_proj", "up_proj")):
        rule = rules[f"{owner}.{local}.bias"]
        (source,) = rule.sources
        assert (source.name, source.shape) == (f"model.{owner}.gate_up_proj_bias", (4, 12))
        np.testing.assert_array_equal(rule.combined([packed_np]), packed_np[:, start::2])
    (source,) = rules[f"{owner}.down_proj.bias"].sources
    assert (source.name, source.shape) == (f"model.{owner}.down_proj_bias", (4, 8))


def test_weights_have_the_names_of_the_checkpoint(model):
    rules = model.weight_rules()
    names = {
        "mlp.gate.kernel": ("mlp.router.weight", (4, 8)),
        "mlp.gate.bias": ("mlp.router.bias", (4,)),
        "mlp.experts.up_proj.kernel": ("mlp.experts.gate_up_proj", (4, 8, 12)),
        "mlp.experts.down_proj.kernel": ("mlp.experts.down_proj", (4, 6, 8)),
        "self_attn.sinks": ("self_attn.sinks", (8,)),
    }
    for name, (of_checkpoint, shape) in names.items():
        (source,) = rules[f"layers.1.{name}"].sources
        assert (source.name, source.shape) == (f"model.layers.1.{of_checkpoint}", shape)


def test_activation_is_bounded_and_up_gets_one_more():
    experts = ClampedExperts(2, 4, 3, alpha=1.5, limit=2.0, dtype=jnp.dtype("float32"))
    gate = np.array([[-3.0, 0.5, 5.0]], np.float32)
    up = np.array([[-9.0, 0.25, 9.0]], np.float32)
    # A gate has no lower bound.
    bounded_gate, bounded_up = np.array([[-3.0, 0.5, 2.0]]), np.array([[-2.0, 0.25, 2.0]])
    expected = (bounded_up + 1) * bounded_gate / (1 + np.exp(-1.5 * bounded_gate))
    np.testing.assert_allclose(
        experts.join(jnp.asarray(gate), jnp.asarray(up)), expected, rtol=1e-6
    )
