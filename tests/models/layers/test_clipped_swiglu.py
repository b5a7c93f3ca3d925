"""Gated MLPs and experts that clip."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.clipped_swiglu import ClippedExperts, ClippedGatedMLP
from tests import on_device
from tests.models.plain_context import plain_context

# Inputs of the activation and of the clip, and what both give with a limit of 2.
GATE = [5.0, -1.0, 1.0]
UP = [-3.0, 3.0, 0.5]
JOINED = [2 * -2, -2 / (1 + math.e), 0.5 / (1 + math.exp(-1))]


def test_the_activated_gate_is_clipped_above_and_up_on_both_sides():
    experts = ClippedExperts(1, 1, 3, activation="silu", limit=2.0, dtype=jnp.dtype("float32"))
    joined = experts.join(on_device.array([GATE]), on_device.array([UP]))
    np.testing.assert_allclose(joined, [JOINED], rtol=1e-6)


def test_mlp_by_hand():
    mlp = ClippedGatedMLP(1, 3, activation="silu", limit=2.0, dtype=jnp.dtype("float32"))
    mlp.gate_proj.kernel[...] = on_device.array([GATE])
    mlp.up_proj.kernel[...] = on_device.array([UP])
    mlp.down_proj.kernel[...] = on_device.array([[1.0], [10.0], [100.0]])
    wanted = np.dot(JOINED, [1.0, 10.0, 100.0])
    np.testing.assert_allclose(mlp(on_device.ones((1, 1)), plain_context()), [[wanted]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_clipping_keeps_the_dtype(dtype):
    experts = ClippedExperts(1, 1, 3, activation="silu", limit=2.0, dtype=jnp.dtype(dtype))
    gate, up = on_device.array([GATE], dtype), on_device.array([UP], dtype)
    assert experts.join(gate, up).dtype == dtype
