"""Kinds of `LatentAttention`."""

import jax
import jax.numpy as jnp

from models.config.latent_config import LatentAttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention_variants import QueryScale
from models.layers.latent_attention import LatentAttention


class ScaledQueriesLatentAttention(LatentAttention):
    """Latent attention whose queries have a factor that grows with their position."""

    def __init__(
        self, config: LatentAttentionConfig, *, query_scale: QueryScale, dtype: jnp.dtype
    ) -> None:
        super().__init__(config, dtype=dtype)
        self.query_scale = query_scale

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        q_latent, q_rope = super()._queries(normed, cos, sin, context)
        factors = self.query_scale.factors(context.of_rows(context.batch.positions))[:, None, None]
        # The latent part is linear in the query, so it may get the factor after `k_up`.
        return (
            (q_latent.astype(jnp.float32) * factors).astype(q_latent.dtype),
            (q_rope.astype(jnp.float32) * factors).astype(q_rope.dtype),
        )
