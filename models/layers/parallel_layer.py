"""A layer whose attention and MLP run in parallel: both read the same normed input."""

from collections.abc import Callable

import jax
from flax import nnx

from models.carry import Carry
from models.forward_batch import KVCache
from models.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.mlp import GatedMLP


class ParallelLayer(nnx.Module):
    """Attention and the MLP each read the normed residual stream, and both add to it.

    Source: GPT-J, github.com/kingoflolz/mesh-transformer-jax.
    """

    def __init__(
        self, *, attention: Attention, mlp: GatedMLP, norm: Callable[[], nnx.Module]
    ) -> None:
        self.input_layernorm = norm()
        self.self_attn = attention
        self.mlp = mlp

    def __call__(
        self, carry: Carry, kv_cache: KVCache, context: LayerContext
    ) -> tuple[Carry, KVCache]:
        attended, kv_cache = self.self_attn(
            carry.hidden, kv_cache, context, norm=self.input_layernorm
        )
        hidden = context.by_token(self._add_parts, context.kept(carry.hidden), attended)
        return Carry(hidden=hidden), kv_cache

    def _add_parts(
        self,
        hidden: jax.Array,  # f[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    ) -> jax.Array:  # f[num_queries, hidden]
        out = self.self_attn.project_out(attended)
        return hidden + out + self.mlp(self.input_layernorm(hidden))
