"""MLPs: gated ones (SwiGLU in the Llama family, GeGLU in Gemma), and the plain one of GPT."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext
from models.layers.linear import Linear


class MLP(Protocol):
    """The part of a layer that follows attention, or is parallel to it."""

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
        gate = self._activated(self.gate_proj(x, context))
        return self.down_proj(gate * self.up_proj(x, context), context)

    def _activated(self, gate: jax.Array) -> jax.Array:
        return activate(gate, self.activation)


class PlainMLP(nnx.Module):
    """`down(activation(up(x)))`."""

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
        self.up_proj = linear(hidden_size, intermediate_size, axes=(None, "inner"))
        self.down_proj = linear(intermediate_size, hidden_size, axes=("inner", None))
        self.activation = activation

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return self.down_proj(self._activated(self.up_proj(x, context)), context)

    def _activated(self, x: jax.Array) -> jax.Array:
        return activate(x, self.activation)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation by the name that config.json gives it; the shape and dtype stay."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    # Computed in float32 and rounded once, as a fused kernel does.
    is_tanh = activation == "gelu_pytorch_tanh"
    return jax.nn.gelu(x.astype(jnp.float32), approximate=is_tanh).astype(x.dtype)
