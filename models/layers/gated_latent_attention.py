"""Latent attention with gates: one per head, or, in index attention, one per number."""

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.config.index_config import IndexedLatentConfig
from models.config.latent_config import LatentAttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.index_attention import IndexedLatentAttention
from models.layers.indexer import Indexer, IndexQueries
from models.layers.latent_attention import LatentAttention
from models.layers.linear import Linear
from models.layers.self_attention import Norm


class HeadGatedLatentAttention(LatentAttention):
    """Latent attention whose heads are multiplied by `sigmoid(g_proj(x))`."""

    def __init__(self, config: LatentAttentionConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype=dtype)
        self.g_proj = Linear(
            config.hidden_size, config.num_q_heads, axes=(None, "heads"), dtype=dtype
        )

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        """See `SelfAttention.__call__`."""
        attended, pages = super().__call__(hidden, pages, context, norm=norm)

        def apply_gate(hidden: jax.Array, attended: jax.Array, context: LayerContext) -> jax.Array:
            factors = jax.nn.sigmoid(self.g_proj(norm(hidden), context).astype(jnp.float32))
            # `expand` is linear in each head.
            return attended * factors.astype(attended.dtype)[:, :, None]

        gated = context.of_kept().by_token(apply_gate, context.kept(hidden), attended)
        return gated, pages


class GatedIndexedLatentAttention(IndexedLatentAttention):
    """Index attention whose values are multiplied by `sigmoid(gate_proj(x))`.

    x joins the normed latent of the queries and the same latent before its norm. The queries are
    projections of x too. The index reads only the normed latent.
    """

    def __init__(self, config: IndexedLatentConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(config, make_indexer=NormedHalfIndexer, dtype=dtype)
        sizes = {"q_b_proj": config.head_dim, "gate_proj": config.value_head_dim}
        for name, width in sizes.items():
            out_features = config.num_q_heads * width
            axes = (None, "heads")
            setattr(
                self, name, Linear(2 * config.q_latent_dim, out_features, axes=axes, dtype=dtype)
            )

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        """See `SelfAttention.__call__`."""
        attended, pages = super().__call__(hidden, pages, context, norm=norm)

        def apply_gate(hidden: jax.Array, attended: jax.Array, context: LayerContext) -> jax.Array:
            gate = self.gate_proj(self._query_input(norm(hidden), context), context)
            values = self.expand(attended, context)
            factors = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(values.shape)
            return (values * factors).astype(values.dtype)

        gated = context.of_kept().by_token(apply_gate, context.kept(hidden), attended)
        return gated, pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, value_head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        return self.o_proj(attended.reshape(attended.shape[0], -1), context)

    def _query_input(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        """f[num_rows, 2 * q_latent_dim]."""
        latent = self.q_a_proj(normed, context)
        return jnp.concatenate([self.q_a_layernorm(latent), latent], axis=-1)


class NormedHalfIndexer(Indexer):
    """An index that reads the first half of the queries' input, the normed latent."""

    def queries(
        self,
        x: jax.Array,  # f[num_rows, 2 * query_dim]
        normed: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        context: LayerContext,
    ) -> IndexQueries:
        return super().queries(x[:, : x.shape[1] // 2], normed, cos, sin, context)
