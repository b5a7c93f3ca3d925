"""Muse Spark's norm, its gates of the residual stream, and its norm of heads, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.forward.carry import Carry
from models.layers.gated_attention import GatedAttention
from models.layers.muse_layers import (
    GatedResidualLayer,
    InputScaledRMSNorm,
    NormedGatedAttention,
    ResidualGate,
)
from tests import on_device
from tests.models.layers.test_output_norm_layer import Attention, times
from tests.models.plain_context import plain_context


def test_input_is_scaled_and_then_normed():
    norm = InputScaledRMSNorm(2, eps=0.0, dtype=jnp.float32)
    norm.offset[...] = on_device.array([0.0, 1.0])
    # The scaled input is (3, 4), whose root mean square is sqrt(12.5).
    np.testing.assert_allclose(
        norm(on_device.array([[3.0, 2.0]])), [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6
    )
    assert norm(on_device.ones((1, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_gate_by_hand():
    gate = ResidualGate(3, temperature=0.5)
    # Divided by the temperature: 0, log(4) and 100, whose sigmoids are 0.5, 0.8 and 1.
    gate.gate[...] = on_device.array([0.0, 0.5 * np.log(4.0), 50.0])
    total = gate(on_device.full((1, 3), 10.0), on_device.full((1, 3), 2.0))
    wanted = [0.75**0.5 * 10 + 1.0, 0.6 * 10 + 1.6, 0.001**0.5 * 10 + 2.0]
    np.testing.assert_allclose(total, [wanted], rtol=1e-6)
    rounded = gate(on_device.ones((1, 3), jnp.bfloat16), on_device.ones((1, 3), jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16


def test_both_outputs_are_added_with_gates():
    layer = GatedResidualLayer(
        attention=Attention(),
        mlp=lambda x, context: x + 10.0,
        norm=times(2.0),
        attention_out_norm=times(3.0),
        mlp_out_norm=times(5.0),
        residual_gate=lambda: ResidualGate(1, temperature=1.0),
    )
    carry, _ = layer(Carry(hidden=on_device.ones((1, 1))), None, plain_context())
    hidden = 0.75**0.5 * 1.0 + 0.5 * 3.0 * (2.0 * 1.0 + 1.0)
    wanted = 0.75**0.5 * hidden + 0.5 * 5.0 * (2.0 * hidden + 10.0)
    np.testing.assert_allclose(carry.hidden, [[wanted]], rtol=1e-6)


def test_heads_are_normed_before_the_gate(monkeypatch):
    attended = on_device.array([[[3.0, 4.0]]])
    monkeypatch.setattr(GatedAttention, "attend", lambda self, *args: (attended, "pages"))
    config = AttentionConfig(
        hidden_size=2, num_q_heads=1, num_kv_heads=1, head_dim=2, rope=RopeConfig(), scale=1.0
    )
    norms = {name: nnx.Module() for name in ("q_norm", "k_norm")}
    attention = NormedGatedAttention(
        config, gate=jax.nn.sigmoid, o_norm=lambda x: x / 5.0, dtype=jnp.float32, **norms
    )
    normed, pages = attention.attend(None, None, None, None)
    np.testing.assert_allclose(normed, [[[0.6, 0.8]]], rtol=1e-6)
    assert pages == "pages"
