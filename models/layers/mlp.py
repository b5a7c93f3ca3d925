"""The gated MLP: SwiGLU in the Llama family, GeGLU in Gemma."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import Activation, ModelConfig
from models.layers.linear import Linear, parts_of_each, side_by_side


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`.

    Source: arXiv:2002.05202.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, intermediate, use_bias=config.mlp_bias, dtype=dtype)
        self.up_proj = Linear(hidden, intermediate, use_bias=config.mlp_bias, dtype=dtype)
        self.down_proj = Linear(intermediate, hidden, use_bias=config.mlp_bias, dtype=dtype)
        self.activation = config.hidden_act

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, hidden]
    ) -> jax.Array:  # f[num_tokens, hidden]
        gates, ups = parts_of_each([self.gate_proj, self.up_proj], [x, x])
        inner = [activate(gate, self.activation) * up for gate, up in zip(gates, ups, strict=True)]
        return self.down_proj(side_by_side(inner))


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation by the name that config.json gives it; the shape and dtype stay."""
    if activation == "silu":
        return jax.nn.silu(x)
    # The polynomial and the tanh in float32, and one rounding: what a fused kernel does.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
