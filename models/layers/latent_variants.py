"""Kinds of `LatentAttention`."""

import jax
import jax.numpy as jnp

from models.config.attention_config import SELF_ATTENTION
from models.config.latent_config import LatentAttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention_variants import QueryScale
from models.layers.latent_attention import LatentAttention
from models.layers.per_layer_inputs import scaled


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
        # The latent part is linear in the query, so it may get the factor before or after `k_up`.
        return (
            (q_latent.astype(jnp.float32) * factors).astype(q_latent.dtype),
            (q_rope.astype(jnp.float32) * factors).astype(q_rope.dtype),
        )


class ScaledLatentsAttention(LatentAttention):
    """Latent attention with constant factors of queries and of cached latents."""

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        q_factor: float,
        latent_factor: float,
        cache_name: str = SELF_ATTENTION,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(config, cache_name=cache_name, dtype=dtype)
        self.q_factor, self.latent_factor = q_factor, latent_factor

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        q_latent, q_rope = super()._queries(normed, cos, sin, context)
        return scaled(q_latent, self.q_factor), scaled(q_rope, self.q_factor)

    def _latents(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        latent, rope_key = jnp.split(
            super()._latents(normed, cos, sin, context), [self.config.latent_dim], axis=-1
        )
        return jnp.concatenate([scaled(latent, self.latent_factor), rope_key], axis=-1)
