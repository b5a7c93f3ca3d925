"""The gated MLP of the Llama family (SwiGLU)."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.layers.linear import Linear


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`.

    Source: arXiv:2002.05202.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, intermediate, use_bias=config.mlp_bias, dtype=dtype)
        self.up_proj = Linear(hidden, intermediate, use_bias=config.mlp_bias, dtype=dtype)
        self.down_proj = Linear(intermediate, hidden, use_bias=config.mlp_bias, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, hidden]
    ) -> jax.Array:  # f[num_tokens, hidden]
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
