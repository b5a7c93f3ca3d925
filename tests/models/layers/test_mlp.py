"""The MLPs and their activations."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.mlp import PlainMLP, activate
from tests import on_device
from tests.models.plain_context import plain_context


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", 2 / (1 + math.exp(-2))),
        # The tanh form; the exact gelu of 2 is 1.95450.
        ("gelu", 1 + math.erf(math.sqrt(2))),
        ("relu2", 4.0),
        ("gelu_pytorch_tanh", 1 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8))),
    ],
)
def test_activation_by_hand(activation, expected):
    np.testing.assert_allclose(activate(on_device.array([2.0]), activation), [expected], rtol=1e-6)


def test_activation_keeps_its_dtype():
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu2"):
        assert activate(on_device.ones(1, jnp.bfloat16), activation).dtype == jnp.bfloat16


def test_squared_relu_of_a_negative_number_is_zero():
    assert activate(on_device.array([-3.0]), "relu2").tolist() == [0.0]


def test_plain_mlp_by_hand():
    mlp = PlainMLP(1, 2, activation="relu2", use_bias=True, dtype=jnp.float32)
    mlp.up_proj.kernel[...] = on_device.array([[1.0, -1.0]])
    mlp.up_proj.bias[...] = on_device.array([1.0, 5.0])
    mlp.down_proj.kernel[...] = on_device.array([[10.0], [1.0]])
    mlp.down_proj.bias[...] = on_device.array([0.5])
    # 3 -> (4, 2) -> (16, 4) -> 164.5
    np.testing.assert_allclose(mlp(on_device.array([[3.0]]), plain_context()), [[164.5]])
