"""The part of index attention that has no weights: it reads the pages of two caches."""

import jax

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.index_config import INDEX_KEYS, IndexedLatentConfig
from models.forward.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerContext
from models.layers.indexer import IndexQueries


def choose_tokens(
    config: IndexedLatentConfig, queries: IndexQueries, pages: Pages, context: LayerContext
) -> jax.Array:  # i32[num_queries, index_top_k]
    """The tokens that an index chooses, by the index keys in the cache.

    Each device of a mesh makes the whole choice.
    """
    kernels, cache = context.kernels, context.cache(INDEX_KEYS)

    def choose(queries: IndexQueries, pages: Pages, *sequences: jax.Array) -> jax.Array:
        return pallas_kernels.index_top_k(
            *(*queries, cache.format.view(pages, cache.block_size), cache.row, *sequences),
            top_k=config.index_top_k,
            kv_dtype=cache.format.kv_dtype(pages),
            batch_invariant=kernels.batch_invariant,
            implementation=kernels.implementation,
            target=kernels.target,
        )

    return kernels.by_device(
        *(choose, queries, pages, cache.block_tables, cache.seq_lens, context.query_start_loc),
        in_specs=(WHOLE, PAGES_BY_DEVICE, *[WHOLE] * 3),
        out_specs=WHOLE,
    )


def attend_to_tokens(
    config: IndexedLatentConfig,
    q_latent: jax.Array,  # f[num_rows, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_rows, num_q_heads, rope_dim]
    chosen: jax.Array,  # i32[num_rows, index_top_k], as `choose_tokens` returns it
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    pages: Pages,
    context: LayerContext,
) -> jax.Array:  # f[num_rows, num_q_heads, latent_dim]
    """As `latent_attend`, to the chosen tokens only."""
    kernels, cache = context.kernels, context.cache(SELF_ATTENTION)

    def attend(
        q_latent: jax.Array,
        q_rope: jax.Array,
        chosen: jax.Array,
        pages: Pages,
        *sequences: jax.Array,
    ) -> jax.Array:
        return pallas_kernels.sparse_latent_attention(
            *(q_latent, q_rope, cache.format.view(pages, cache.block_size), cache.row),
            *(*sequences, chosen),
            scale=config.scale,
            kv_dtype=cache.format.kv_dtype(pages),
            batch_invariant=kernels.batch_invariant,
            implementation=kernels.implementation,
            target=kernels.target,
        )

    return kernels.by_device(
        *(attend, q_latent, q_rope, chosen, pages),
        *(cache.block_tables, seq_lens, query_start_loc),
        in_specs=(*[TOKENS_BY_HEAD] * 2, WHOLE, PAGES_BY_DEVICE, *[WHOLE] * 3),
        out_specs=TOKENS_BY_HEAD,
    )
