"""The part of latent attention that has no weights: it writes and reads the pages of the cache."""

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.latent_config import LatentAttentionConfig
from models.forward.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerContext


def write_vectors(
    new: jax.Array | None,  # f[num_tokens, vector_dim], or a vector for each of `tokens`
    pages: Pages,
    context: LayerContext,
    *,
    cache_name: str = SELF_ATTENTION,
    tokens: jax.Array | None = None,  # i32[n], in [0, num_tokens]
) -> Pages:
    """Writes the step's vectors, such as latents with rotary keys, into one of the layer's caches.

    Each device of a mesh writes all of them, or only the ones of its own positions.

    Args:
        new: None if the cache belongs to an earlier layer, which has written them already.
        cache_name: The cache's local name in the layer.
        tokens: Indices of the tokens whose vectors are written; `num_tokens` writes none. If None,
            the vectors of all tokens are written.
    """
    if new is None:
        return pages
    kernels, cache = context.kernels, context.cache(cache_name)
    new = jnp.pad(new, ((0, 0), (0, cache.format.width - new.shape[1])))
    pad_slot = pallas_kernels.pad_slot(*pages.shape[:2], cache.block_size)
    slots, positions = cache.slots, context.batch.positions
    if tokens is not None:
        slots = slots.at[tokens].get(mode="fill", fill_value=pad_slot)
        positions = positions.at[tokens].get(mode="fill", fill_value=0)

    def write(new: jax.Array, pages: Pages, slots: jax.Array, positions: jax.Array) -> Pages:
        slots = kernels.context_ranks.own_slots(slots, positions, pad_slot)
        view = pallas_kernels.kv_scatter(
            cache.format.view(pages, cache.block_size),
            *(new[:, None], None, slots, cache.row),
            kv_dtype=cache.format.kv_dtype(pages),
            implementation=kernels.implementation,
            target=kernels.target,
        )
        return cache.format.unview(view, pages)

    return kernels.by_device(
        *(write, new, pages, slots, positions),
        in_specs=(WHOLE, PAGES_BY_DEVICE, WHOLE, WHOLE),
        out_specs=PAGES_BY_DEVICE,
    )


def latent_attend(
    config: LatentAttentionConfig,
    q_latent: jax.Array,  # f[num_rows, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_rows, num_q_heads, rope_dim]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    pages: Pages,
    context: LayerContext,
    *,
    cache_name: str = SELF_ATTENTION,
) -> jax.Array:  # f[num_rows, num_q_heads, latent_dim]
    """Attends to the cache, into which the step's latents have been written.

    Each device of a mesh attends with its own query heads.

    Args:
        seq_lens: Of the tokens up to the last row of each request; so is `query_start_loc`.
    """
    kernels, cache = context.kernels, context.cache(cache_name)

    def attend(
        q_latent: jax.Array,
        q_rope: jax.Array,
        pages: Pages,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        query_start_loc: jax.Array,
    ) -> jax.Array:
        view = cache.format.view(pages, cache.block_size)

        def of_own_keys(
            q_latent: jax.Array, q_rope: jax.Array, seq_lens: jax.Array, **options: Any
        ) -> jax.Array | tuple[jax.Array, jax.Array]:
            return pallas_kernels.latent_attention(
                *(q_latent, q_rope, view, cache.row, block_tables, seq_lens, query_start_loc),
                scale=config.scale,
                kv_dtype=cache.format.kv_dtype(pages),
                max_query_len=context.num_queries_per_req,
                batch_invariant=kernels.batch_invariant,
                implementation=kernels.implementation,
                target=kernels.target,
                **options,
            )

        return kernels.context_ranks.attend(
            *(of_own_keys, (q_latent, q_rope), seq_lens, query_start_loc),
            max_query_len=context.num_queries_per_req,
        )

    return kernels.by_device(
        *(attend, q_latent, q_rope, pages, cache.block_tables, seq_lens, query_start_loc),
        in_specs=(*[TOKENS_BY_HEAD] * 2, PAGES_BY_DEVICE, *[WHOLE] * 3),
        out_specs=TOKENS_BY_HEAD,
    )
