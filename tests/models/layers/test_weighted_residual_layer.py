"""A layer that multiplies its residual stream."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.forward.carry import Carry
from models.layers.factors import Factors
from models.layers.weighted_residual_layer import WeightedResidualLayer
from tests import on_device
from tests.models.plain_context import plain_context


class AddOne(nnx.Module):
    """Attention that returns its normed input plus 1."""

    def __call__(self, hidden, pages, context, *, norm):
        return norm(hidden) + 1.0, pages

    def project_out(self, attended, context):
        return attended


def test_layer_by_hand():
    layer = WeightedResidualLayer(
        attention=AddOne(),
        mlp=lambda x, context: x + 10.0,
        norm=lambda: lambda x: 2.0 * x,
        factors=lambda: Factors(2, dtype=jnp.float32),
    )
    layer.input_residual.scale[...] = on_device.array([0.5, 3.0])
    layer.post_attention_residual.scale[...] = on_device.array([0.25, 1.0])
    carry, _ = layer(Carry(hidden=on_device.ones((1, 2))), None, plain_context())
    # hidden = factor * 1 + (2 * 1 + 1); factor * hidden + (2 * hidden + 10)
    np.testing.assert_allclose(carry.hidden, [[2.25 * 3.5 + 10.0, 3.0 * 6.0 + 10.0]])
