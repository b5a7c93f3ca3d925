"""The part of latent attention that has no weights: it writes and reads the pages of the cache."""

import jax
import jax.numpy as jnp

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.latent_config import LatentAttentionConfig
from models.forward.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerContext


def latent_attend(
    config: LatentAttentionConfig,
    q_latent: jax.Array,  # f[num_queries, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_queries, num_q_heads, rope_dim]
    new: jax.Array | None,  # f[num_tokens, latent_dim + rope_dim]
    pages: Pages,
    context: LayerContext,
    *,
    cache_name: str = SELF_ATTENTION,
) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, latent_dim]
    """Writes the step's latents and rotary keys into the layer's cache, and attends to the cache.

    Each device of a mesh writes all of them, and attends with its own query heads.

    Args:
        new: None if the cache belongs to an earlier layer, which has written them already.
        cache_name: The cache's local name in the layer.
    """
    kernels, cache = context.kernels, context.cache(cache_name)
    if new is not None:
        new = jnp.pad(new, ((0, 0), (0, cache.format.width - new.shape[1])))
    chosen = {
        "kv_dtype": cache.format.kv_dtype(pages),
        "implementation": kernels.implementation,
        "target": kernels.target,
    }

    def of_own_heads(
        q_latent: jax.Array,
        q_rope: jax.Array,
        new: jax.Array | None,
        pages: Pages,
        slots: jax.Array,
        *sequences: jax.Array,
    ) -> tuple[jax.Array, Pages]:
        view = cache.format.view(pages, cache.block_size)
        if new is not None:
            new = new[:, None]
            view = pallas_kernels.kv_scatter(view, new, None, slots, cache.row, **chosen)
        attended = pallas_kernels.latent_attention(
            *(q_latent, q_rope, view, cache.row, *sequences),
            scale=config.scale,
            max_query_len=context.num_queries_per_req,
            batch_invariant=kernels.batch_invariant,
            **chosen,
        )
        return attended, cache.format.unview(view, pages)

    return kernels.by_device(
        *(of_own_heads, q_latent, q_rope, new, pages, cache.slots),
        *(cache.block_tables, cache.seq_lens, context.query_start_loc),
        in_specs=(*[TOKENS_BY_HEAD] * 2, WHOLE, PAGES_BY_DEVICE, *[WHOLE] * 4),
        out_specs=(TOKENS_BY_HEAD, PAGES_BY_DEVICE),
    )
