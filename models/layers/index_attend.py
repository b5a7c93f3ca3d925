"""The part of index attention that has no weights: it writes and reads the pages of two caches."""

import jax
import jax.numpy as jnp

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.index_config import INDEX_KEYS, IndexedLatentConfig
from models.forward.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerCache, LayerContext
from models.layers.indexer import IndexQueries


def index_attend(
    config: IndexedLatentConfig,
    queries: tuple[jax.Array, jax.Array],
    latents: jax.Array | None,  # f[num_tokens, latent_dim + rope_dim]
    index: tuple[IndexQueries, jax.Array] | None,
    chosen: jax.Array | None,  # i32[num_queries, index_top_k]
    pages: Pages,
    context: LayerContext,
) -> tuple[jax.Array, jax.Array, Pages]:
    """Writes the step's latents and index keys, chooses tokens, and attends to them.

    Each device of a mesh writes all of them and makes the whole choice. It attends with its own
    query heads. If no request can have more than `index_top_k` tokens, all tokens attend to all
    earlier ones, and index keys are not written.

    Args:
        queries: f[num_queries, num_q_heads, latent_dim] and f[num_queries, num_q_heads, rope_dim].
        latents: None if the cache belongs to an earlier layer, which has written them already.
        index: The index's queries of num_queries rows, and its keys f[num_tokens, head_dim]. None
            if the layer has no index.
        chosen: What `index_top_k` chose in an earlier layer, for layers without an index.

    Returns:
        f[num_queries, num_q_heads, latent_dim], the choice, and the pages.
    """
    kernels, cache = context.kernels, context.cache(SELF_ATTENTION)
    chosen_body = {"implementation": kernels.implementation, "target": kernels.target}
    alike = {"batch_invariant": kernels.batch_invariant, **chosen_body}
    attends_to_all = config.index_top_k >= cache.block_tables.shape[1] * cache.block_size
    if attends_to_all:
        index = None
    key_cache = None if index is None else context.cache(INDEX_KEYS)
    starts = context.query_start_loc

    def write(cache: LayerCache, new: jax.Array, pages: Pages, slots: jax.Array) -> Pages:
        view = cache.format.view(pages, cache.block_size)
        new = jnp.pad(new, ((0, 0), (0, cache.format.width - new.shape[1])))
        kv_dtype = cache.format.kv_dtype(pages)
        view = pallas_kernels.kv_scatter(
            *(view, new[:, None], None, slots, cache.row), kv_dtype=kv_dtype, **chosen_body
        )
        return cache.format.unview(view, pages)

    def choose(
        index_queries: IndexQueries, pages: Pages, block_tables: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        return pallas_kernels.index_top_k(
            *index_queries,
            key_cache.format.view(pages, key_cache.block_size),
            *(key_cache.row, block_tables, *rest),
            top_k=config.index_top_k,
            kv_dtype=key_cache.format.kv_dtype(pages),
            **alike,
        )

    def of_own_heads(
        q_latent: jax.Array,
        q_rope: jax.Array,
        latents: jax.Array | None,
        index: tuple[IndexQueries, jax.Array] | None,
        chosen: jax.Array | None,
        pages: Pages,
        tables: tuple[jax.Array, ...],
        key_tables: tuple[jax.Array, ...],
        starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Pages]:
        slots, block_tables, seq_lens = tables
        # All writes come before the reads, so that no write waits for a read of the same layer.
        if index is not None:
            index_queries, keys = index
            key_slots, key_block_tables, _ = key_tables
            pages = write(key_cache, keys, pages, key_slots)
        if latents is not None:
            pages = write(cache, latents, pages, slots)
        if index is not None:
            chosen = choose(index_queries, pages, key_block_tables, seq_lens, starts)
        view = cache.format.view(pages, cache.block_size)
        arguments = (q_latent, q_rope, view, cache.row, block_tables, seq_lens, starts)
        options = {"scale": config.scale, "kv_dtype": cache.format.kv_dtype(pages), **alike}
        if attends_to_all:
            attended = pallas_kernels.latent_attention(
                *arguments, max_query_len=context.num_queries_per_req, **options
            )
        else:
            attended = pallas_kernels.sparse_latent_attention(*arguments, chosen, **options)
        return attended, chosen, pages

    return kernels.by_device(
        *(of_own_heads, *queries, latents, index, chosen, pages),
        *(_tables(cache), None if key_cache is None else _tables(key_cache), starts),
        in_specs=(*[TOKENS_BY_HEAD] * 2, *[WHOLE] * 3, PAGES_BY_DEVICE, *[WHOLE] * 3),
        out_specs=(TOKENS_BY_HEAD, WHOLE, PAGES_BY_DEVICE),
    )


def _tables(cache: LayerCache) -> tuple[jax.Array, jax.Array, jax.Array]:
    return cache.slots, cache.block_tables, cache.seq_lens
