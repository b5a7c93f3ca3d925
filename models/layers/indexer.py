"""`Indexer`: the queries, keys and weights by which index attention chooses tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.index_config import IndexConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import split_heads
from models.layers.layer_norm import LayerNorm
from models.layers.linear import Linear
from models.layers.rotary import apply_rotary, apply_rotary_to_neighbors
from models.layers.routing import Router

NORM_EPS = 1e-6


class IndexQueries(NamedTuple):
    """The inputs with which a token scores other tokens (`pallas_kernels.index_top_k`)."""

    q: jax.Array  # f[num_rows, num_heads, head_dim]
    weights: jax.Array  # f32[num_rows, num_heads]


class Indexer(nnx.Module):
    """The lightning indexer. All heads share one key per token.

    Its weights of heads are never rounded, because a small error would choose other tokens.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """

    def __init__(
        self, config: IndexConfig, *, hidden_size: int, query_dim: int, dtype: jnp.dtype
    ) -> None:
        """Makes the index with weights to be filled in.

        Args:
            query_dim: Width of the input of queries.
        """
        self.wq_b = Linear(query_dim, config.num_heads * config.head_dim, dtype=dtype)
        self.wk = Linear(hidden_size, config.head_dim, dtype=dtype)
        self.k_norm = LayerNorm(config.head_dim, eps=NORM_EPS, dtype=dtype)
        self.weights_proj = Router(hidden_size, config.num_heads, dtype=jnp.dtype("float32"))
        self.config = config

    def queries(
        self,
        x: jax.Array,  # f[num_rows, query_dim]
        normed: jax.Array,  # f[num_rows, hidden]
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
        context: LayerContext,
    ) -> IndexQueries:
        """The queries, which are turned, and the weights of the heads.

        Args:
            x: The input of queries; in DeepSeek the latent of the attention's queries.
        """
        q = split_heads(self.wq_b(x, context), self.config.head_dim)
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        weights = self.weights_proj.scores(normed) * scale
        return IndexQueries(self._rotated(q, cos, sin), weights)

    def keys(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_rows, head_dim]
        keys = self.k_norm(self.wk(normed, context))
        return self._rotated(keys[:, None], cos, sin)[:, 0]

    def _rotated(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        turn = apply_rotary_to_neighbors if self.config.turns_neighbors else apply_rotary
        return turn(x, cos, sin)
