"""xIELU, an activation with trained numbers, and the MLP that uses it."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.dense_config import Activation
from models.layers.mlp import PlainMLP
from models.weight_rule import Source, WeightRule

# Shapes in checkpoints. The first two numbers are trained.
_STORED_SHAPES = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


class Xielu(nnx.Module):
    """`a_p * x^2 + beta * x` for positive x, `(exp(x) - 1 - x) * a_n + beta * x` for others.

    `a_p` is softplus(alpha_p), and `a_n` is beta + softplus(alpha_n). Checkpoints have all four
    numbers. `exp` gets at most `eps`, which is slightly negative.

    Source: arXiv:2411.13010.
    """

    def __init__(self, *, dtype: jnp.dtype) -> None:
        self.alpha_p = nnx.Param(jnp.zeros((1,), dtype))
        self.alpha_n = nnx.Param(jnp.zeros((1,), dtype))
        self.beta = nnx.Param(jnp.zeros((1,), dtype))
        self.eps = nnx.Param(jnp.zeros((1,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return {
            leaf: WeightRule(
                sources=(Source(name=f"{name}.{leaf}", shape=shape),),
                layout="vector",
                axes=(None,),
                combine=lambda arrays: arrays[0].reshape(1),
            )
            for leaf, shape in _STORED_SHAPES.items()
        }

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, num_features]
    ) -> jax.Array:  # f[num_rows, num_features]
        beta, eps = self.beta[...], self.eps[...]
        factor_p = jax.nn.softplus(self.alpha_p[...])
        factor_n = beta + jax.nn.softplus(self.alpha_n[...])
        positive = factor_p * x * x + beta * x
        negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * factor_n + beta * x
        return jnp.where(x > 0, positive, negative)


class XieluMLP(PlainMLP):
    """`PlainMLP` with xIELU in place of the activation of the config."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the MLP. Its activation is a module, so `activation` is not used."""
        super().__init__(
            hidden_size, intermediate_size, activation=activation, use_bias=use_bias, dtype=dtype
        )
        self.act_fn = Xielu(dtype=dtype)

    def _activated(self, x: jax.Array) -> jax.Array:
        return self.act_fn(x)
