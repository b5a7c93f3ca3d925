"""The gated MLP and its activations."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.mlp import activate


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", 2 / (1 + math.exp(-2))),
        # The tanh form; the exact gelu of 2 is 1.95450.
        ("gelu_pytorch_tanh", 1 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8))),
    ],
)
def test_activation_by_hand(activation, expected):
    np.testing.assert_allclose(activate(jnp.array([2.0]), activation), [expected], rtol=1e-6)


def test_activation_keeps_its_dtype():
    for activation in ("silu", "gelu_pytorch_tanh"):
        assert activate(jnp.ones(1, jnp.bfloat16), activation).dtype == jnp.bfloat16
