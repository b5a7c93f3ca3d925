"""The gated MLP: SwiGLU in the Llama family, GeGLU in Gemma."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.dense_config import Activation
from models.layer_context import LayerContext
from models.layers.linear import Linear


class MLP(Protocol):
    """What a layer has after attention, or beside it."""

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        ...


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`.

    Source: arXiv:2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        linear = functools.partial(Linear, use_bias=use_bias, dtype=dtype)
        self.gate_proj = linear(hidden_size, intermediate_size, axes=(None, "inner"))
        self.up_proj = linear(hidden_size, intermediate_size, axes=(None, "inner"))
        self.down_proj = linear(intermediate_size, hidden_size, axes=("inner", None))
        self.activation = activation

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        gate = activate(self.gate_proj(x, context), self.activation)
        return self.down_proj(gate * self.up_proj(x, context), context)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation by the name that config.json gives it; the shape and dtype stay."""
    if activation == "silu":
        return jax.nn.silu(x)
    # The polynomial and the tanh in float32, and one rounding: what a fused kernel does.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
