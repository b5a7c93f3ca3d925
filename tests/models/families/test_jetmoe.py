"""JetMoE: its config.json, of the first releases too, the names of its weights, and its norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import UnsupportedModelError
from models.families.jetmoe import JetMoeForCausalLM
from models.layers.sparse_mlp import SparseMLP
from models.registry import read_config
from tests.models.plain_context import plain_context

HF_CONFIG = {
    "architectures": ["JetMoeForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "kv_channels": 4,
    "max_position_embeddings": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-5,
}


def make_model() -> JetMoeForCausalLM:
    config = JetMoeForCausalLM.read_config(HF_CONFIG)
    return JetMoeForCausalLM(config, has_head_kernel=False, dtype=jnp.dtype("float32"))


def test_each_expert_of_a_token_has_one_query_head_per_kv_head():
    attention = read_config(HF_CONFIG).attention[0]
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (6, 2, 4)


def test_fields_of_the_first_releases_are_read():
    names = {
        "intermediate_size": "ffn_hidden_size",
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "max_position_embeddings": "n_positions",
    }
    old = {names.get(name, name): value for name, value in HF_CONFIG.items()}
    old |= {"architectures": ["JetMoEForCausalLM"], "bias": True, "glu": True}
    assert read_config(old) == read_config(HF_CONFIG)


@pytest.mark.parametrize("name", ["bias", "glu"])
def test_models_without_biases_or_gates_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=f"{name}=False"):
        read_config({**HF_CONFIG, name: False})


def test_tensors_have_the_names_and_shapes_of_checkpoints():
    rules = make_model().weight_rules()
    sources = {source.name: source.shape for rule in rules.values() for source in rule.sources}
    prefix = "model.layers.2."
    assert {
        name.removeprefix(prefix): shape
        for name, shape in sources.items()
        if name.startswith(prefix)
    } == {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attention.kv_proj.weight": (16, 8),
        "self_attention.experts.bias": (8,),
        "self_attention.experts.input_linear.weight": (5, 8, 8),
        "self_attention.experts.output_linear.weight": (5, 8, 8),
        "self_attention.experts.router.layer.weight": (5, 8),
        "mlp.bias": (8,),
        "mlp.input_linear.weight": (5, 12, 8),
        "mlp.output_linear.weight": (5, 8, 6),
        "mlp.router.layer.weight": (5, 8),
    }


def test_only_the_last_norm_has_the_eps_of_config_json():
    model = nnx.eval_shape(make_model)
    layer = model.layers[0]
    assert layer.input_layernorm.eps == layer.post_attention_layernorm.eps == 1e-6
    assert model.norm.eps == 1e-5


def test_layers_are_compiled_once():
    assert len({kind_of(layer) for layer in nnx.eval_shape(make_model).layers}) == 1


def test_the_mlp_adds_one_bias():
    mlp = make_model().layers[0].mlp
    rng = np.random.default_rng(0)
    for linear in (mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down_proj):
        linear.kernel.set_value(jnp.ones_like(linear.kernel.get_value()))
    bias_np = rng.standard_normal(8).astype(np.float32)
    mlp.bias.set_value(jnp.asarray(bias_np))
    x = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
    context = plain_context(2)
    got, without = jax.jit(lambda x: (mlp(x, context), SparseMLP.__call__(mlp, x, context)))(x)
    np.testing.assert_array_equal(got, without + bias_np)
