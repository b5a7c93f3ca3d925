"""Llama 4: its config.json, pairs of dimensions, factors of queries, and its packed expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config.rope_config import RopeConfig
from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.llama4 import (
    Llama4ForCausalLM,
    Llama4MoE,
)
from models.layers.attention_variants import (
    NormedLastAttention,
    QueryScale,
    ScaledQueriesAttention,
)
from tests.models.plain_context import plain_context

HF_CONFIG = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 6,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}


def test_fields_left_out_have_transformers_defaults():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Llama4TextConfig(num_hidden_layers=8)
    config = Llama4ForCausalLM.read_config(HF_CONFIG)
    first = config.attention[0]
    assert config.num_experts == theirs.num_local_experts
    assert config.num_experts_per_tok == theirs.num_experts_per_tok
    assert config.intermediate_size == theirs.intermediate_size_mlp
    assert config.moe_intermediate_size == HF_CONFIG["intermediate_size"]
    assert config.has_experts == tuple(idx in theirs.moe_layers for idx in range(8))
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert (first.head_dim, first.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert first.qkv_bias == first.out_bias == theirs.attention_bias
    assert first.rope == RopeConfig(theta=theirs.default_theta)
    assert [layer.has_positions for layer in config.attention] == [
        bool(value) for value in theirs.no_rope_layers
    ]
    assert [layer.chunk_size for layer in config.attention] == [
        theirs.attention_chunk_size if layer_type == "chunked_attention" else None
        for layer_type in theirs.layer_types
    ]
    for layer in config.attention:
        assert layer.has_qk_norm == (theirs.use_qk_norm and layer.has_positions)
        is_tuned = theirs.attn_temperature_tuning and not layer.has_positions
        scale = QueryScale(weight=theirs.attn_scale, period=theirs.floor_scale, offset=1)
        assert layer.query_scale == (scale if is_tuned else None)


def test_layers_are_as_the_fields_say():
    fields = {
        "moe_layers": [1, 5],
        "no_rope_layers": [0, 1] * 4,
        "layer_types": ["full_attention"] * 2 + ["chunked_attention"] * 6,
        "attention_chunk_size": 32,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Llama4ForCausalLM.read_config(HF_CONFIG | fields)
    assert [idx for idx, has_experts in enumerate(config.has_experts) if has_experts] == [1, 5]
    assert [layer.has_positions for layer in config.attention] == [False, True] * 4
    assert [layer.chunk_size for layer in config.attention] == [None] * 2 + [32] * 6
    assert {(layer.has_qk_norm, layer.query_scale) for layer in config.attention} == {(False, None)}
    assert config.attention[0].rope.theta == 1e4


def test_first_releases_of_the_hub_spell_the_same_model():
    of_hub = {"no_rope_layers": [], "attn_temperature_tuning": 4, "rope_theta": 5e5}
    config = Llama4ForCausalLM.read_config(HF_CONFIG | of_hub)
    assert config == Llama4ForCausalLM.read_config(HF_CONFIG)


@pytest.mark.parametrize("chunk_size", [None, 131_072])
def test_chunks_that_no_position_feels_are_none(chunk_size):
    config = Llama4ForCausalLM.read_config(HF_CONFIG | {"attention_chunk_size": chunk_size})
    assert {layer.chunk_size for layer in config.attention} == {None}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_experts_per_tok": 2}, UnsupportedModelError, "num_experts_per_tok=2"),
        ({"layer_types": ["linear_attention"] * 8}, UnsupportedModelError, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, ModelConfigError, "expected a list of 8 names"),
        (
            {"layer_types": ["chunked_attention"] * 8, "attention_chunk_size": None},
            ModelConfigError,
            "attention_chunk_size is null",
        ),
        ({"no_rope_layers": [1, 0]}, ModelConfigError, r"no_rope_layers is \[1, 0\]"),
        ({"moe_layers": ["1"]}, ModelConfigError, r"moe_layers is \['1'\]"),
        ({"floor_scale": 0}, ModelConfigError, "floor_scale is 0"),
        ({"attn_temperature_tuning": "yes"}, ModelConfigError, "attn_temperature_tuning is 'yes'"),
    ],
)
def test_fields_that_cannot_be_read_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        Llama4ForCausalLM.read_config(HF_CONFIG | fields)


def test_layers_and_weights_have_the_kinds_and_names_of_the_checkpoint():
    config = Llama4ForCausalLM.read_config(HF_CONFIG | {"interleave_moe_layer_step": 2})
    model = nnx.eval_shape(
        lambda: Llama4ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    kinds = [kind_of(layer) for layer in model.layers]
    assert kinds[0] == kinds[2] == kinds[4] != kinds[1] == kinds[5] != kinds[3] == kinds[7]
    assert isinstance(model.layers[1].self_attn, NormedLastAttention)
    assert isinstance(model.layers[3].self_attn, ScaledQueriesAttention)
    rules = model.weight_rules()
    names = {
        "0.mlp.up_proj.kernel": ("0.feed_forward.up_proj.weight", (16_384, 16)),
        "1.mlp.router.kernel": ("1.feed_forward.router.weight", (16, 16)),
        "1.mlp.experts.up_proj.kernel": ("1.feed_forward.experts.gate_up_proj", (16, 16, 12)),
        "1.mlp.experts.down_proj.kernel": ("1.feed_forward.experts.down_proj", (16, 6, 16)),
        "1.mlp.shared_expert.up_proj.kernel": (
            "1.feed_forward.shared_expert.up_proj.weight",
            (6, 16),
        ),
    }
    for name, (of_checkpoint, shape) in names.items():
        (source,) = rules[f"layers.{name}"].sources
        assert (source.name, source.shape) == (f"model.layers.{of_checkpoint}", shape)


def test_the_score_scales_the_input_of_the_expert_and_not_its_output():
    config = Llama4ForCausalLM.read_config(HF_CONFIG | {"num_local_experts": 3})
    block = Llama4MoE(config, dtype=jnp.dtype("float32"))
    rng = np.random.default_rng(1)
    for _, module in nnx.iter_modules(block):
        if hasattr(module, "kernel"):
            values = rng.standard_normal(module.kernel.get_value().shape)
            module.kernel.set_value(jnp.asarray(values, jnp.float32))
    x_np = rng.standard_normal((6, 16)).astype(np.float32)

    def kernel_np(module: nnx.Module) -> np.ndarray:
        return np.asarray(module.kernel[...], np.float64)

    def gated_np(row_np: np.ndarray, *kernels_np: np.ndarray) -> np.ndarray:
        gate_np, up_np, down_np = kernels_np
        gate = row_np @ gate_np
        return (gate / (1 + np.exp(-gate)) * (row_np @ up_np)) @ down_np

    expected = []
    for row_np in x_np.astype(np.float64):
        scores_np = row_np @ kernel_np(block.router)
        expert_id = scores_np.argmax()
        own_np = row_np / (1 + np.exp(-scores_np[expert_id]))
        linears = ("gate_proj", "up_proj", "down_proj")
        experts_np = [kernel_np(getattr(block.experts, name))[expert_id] for name in linears]
        shared_np = [kernel_np(getattr(block.shared_expert, name)) for name in linears]
        expected.append(gated_np(own_np, *experts_np) + gated_np(row_np, *shared_np))
    got = jax.jit(lambda x: block(x, plain_context(6)))(x_np)
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-4, atol=1e-4)
