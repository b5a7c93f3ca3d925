"""Which norm is applied where if outputs have norms of their own."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.forward.carry import Carry
from models.layers.output_norm_layer import OutputNormLayer
from tests.models.plain_context import plain_context


class Attention(nnx.Module):
    """Returns its normed input plus 1."""

    def __call__(self, hidden, pages, context, *, norm):
        return norm(hidden) + 1.0, pages

    def project_out(self, attended, context):
        return attended


def times(factor):
    return lambda: lambda x: x * factor


def test_layer_by_hand():
    layer = OutputNormLayer(
        attention=Attention(),
        mlp=lambda x, context: x + 10.0,
        norm=times(2.0),
        attention_out_norm=times(3.0),
        mlp_out_norm=times(5.0),
    )
    carry, _ = layer(Carry(hidden=jnp.ones((1, 1))), None, plain_context())
    hidden = 1.0 + 3.0 * (2.0 * 1.0 + 1.0)
    np.testing.assert_allclose(carry.hidden, [[hidden + 5.0 * (2.0 * hidden + 10.0)]])
