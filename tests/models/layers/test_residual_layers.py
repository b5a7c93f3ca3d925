"""Where layers norm and scale what they add to the residual stream."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.forward.carry import Carry
from models.layers.residual_layers import (
    PostNormLayer,
    ScaledPreNormLayer,
    ScaledSandwichNormLayer,
)
from tests.models.plain_context import plain_context


class Norm(nnx.Module):
    """Multiplies by a prime of its own, so that a product shows which norms were applied."""

    primes = (2.0, 3.0, 5.0, 7.0)

    def __init__(self, made: list["Norm"]) -> None:
        self.factor = self.primes[len(made)]
        made.append(self)

    def __call__(self, x):
        return x * self.factor


class Attention(nnx.Module):
    """Returns its normed input plus 1."""

    def __call__(self, hidden, pages, context, *, norm):
        return norm(hidden) + 1.0, pages

    def project_out(self, attended, context):
        return attended


def mlp(x, context):
    return x + 10.0


# Norms are made in the order of their primes; the residual stream starts at 1.
CASES = {
    # hidden = 1 + 3 * (1 + 1); hidden + 5 * (hidden + 10)
    PostNormLayer: 7.0 + 5.0 * 17.0,
    # hidden = 1 + 0.5 * (2 * 1 + 1); hidden + 0.5 * (3 * hidden + 10)
    ScaledPreNormLayer: 2.5 + 0.5 * (3.0 * 2.5 + 10.0),
    # hidden = 1 + 0.5 * 3 * (2 * 1 + 1); hidden + 0.5 * 7 * (5 * hidden + 10)
    ScaledSandwichNormLayer: 5.5 + 0.5 * 7.0 * (5.0 * 5.5 + 10.0),
}


@pytest.mark.parametrize("layer_class", CASES)
def test_layer_by_hand(layer_class):
    made: list[Norm] = []
    scale = {} if layer_class is PostNormLayer else {"residual_scale": 0.5}
    layer = layer_class(attention=Attention(), mlp=mlp, norm=lambda: Norm(made), **scale)
    carry, _ = layer(Carry(hidden=jnp.ones((1, 1))), None, plain_context())
    np.testing.assert_allclose(carry.hidden, [[CASES[layer_class]]])


def test_a_layer_without_an_input_norm_has_no_weight_for_it():
    layer = PostNormLayer(attention=Attention(), mlp=mlp, norm=lambda: Norm([]))
    assert not hasattr(layer, "input_layernorm")
