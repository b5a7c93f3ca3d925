"""Projections take their rows out of tensors that checkpoints pack."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.layers.attention import Attention
from models.layers.mlp import GatedMLP
from models.layers.packed_weights import with_packed_gate_up, with_packed_qkv, with_packed_rows
from models.weight_rule import rules_of_layers

CONFIG = AttentionConfig(
    hidden_size=3,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    v_head_dim=2,
    rope=RopeConfig(),
    scale=1.0,
    qkv_bias=True,
)


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.self_attn = Attention(CONFIG, dtype=jnp.float32)
        self.mlp = GatedMLP(3, 5, activation="silu", dtype=jnp.float32)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([Layer(), Layer()])


RULES = rules_of_layers(Model(), prefix="model.")


def test_queries_keys_and_values_have_consecutive_rows():
    rules = with_packed_qkv(RULES, (CONFIG, CONFIG))
    packed_np = {"weight": np.arange(14 * 3).reshape(14, 3), "bias": np.arange(14)}
    for leaf, stored in (("kernel", "weight"), ("bias", "bias")):
        parts = []
        for projection in ("q_proj", "k_proj", "v_proj"):
            rule = rules[f"layers.1.self_attn.{projection}.{leaf}"]
            (source,) = rule.sources
            assert source.name == f"model.layers.1.self_attn.qkv_proj.{stored}"
            assert source.shape == packed_np[stored].shape
            parts.append(rule.combined([packed_np[stored]]))
        assert [len(part) for part in parts] == [8, 4, 2]
        np.testing.assert_array_equal(np.concatenate(parts), packed_np[stored])


def test_modules_take_their_rows_in_the_order_of_the_tensor():
    widths = {"self_attn.k_proj": 4, "self_attn.v_proj": 2}
    rules = with_packed_rows(RULES, widths, num_layers=2, packed="self_attn.kv_proj")
    packed_np = np.arange(18).reshape(6, 3)
    k, v = (rules[f"layers.1.self_attn.{name}_proj.kernel"] for name in ("k", "v"))
    assert k.sources == v.sources
    assert k.sources[0].name == "model.layers.1.self_attn.kv_proj.weight"
    assert k.sources[0].shape == (6, 3)
    np.testing.assert_array_equal(k.combined([packed_np]), packed_np[:4])
    np.testing.assert_array_equal(v.combined([packed_np]), packed_np[4:])
    q = "layers.1.self_attn.q_proj.kernel"
    assert rules[q] == RULES[q]


def test_gate_comes_before_up():
    rules = with_packed_gate_up(RULES, num_layers=2, intermediate_size=5)
    packed_np = np.arange(30).reshape(10, 3)
    gate, up = (rules[f"layers.0.mlp.{name}_proj.kernel"] for name in ("gate", "up"))
    assert gate.sources == up.sources
    assert gate.sources[0].name == "model.layers.0.mlp.gate_up_proj.weight"
    assert gate.sources[0].shape == (10, 3)
    np.testing.assert_array_equal(gate.combined([packed_np]), packed_np[:5])
    np.testing.assert_array_equal(up.combined([packed_np]), packed_np[5:])


def test_other_rules_stay():
    changed = with_packed_gate_up(RULES, num_layers=2, intermediate_size=5)
    for name in ("layers.0.self_attn.q_proj.kernel", "layers.1.mlp.down_proj.kernel"):
        assert changed[name] == RULES[name]
