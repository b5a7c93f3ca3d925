"""Attention to given positions of the KV cache, and writes without attention."""

import jax

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION, AttentionConfig
from models.forward.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerContext
from models.layers.attend import with_copies, with_width


def write_keys_and_values(
    k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    pages: Pages,
    context: LayerContext,
) -> Pages:
    """Writes the step's keys and values into the layer's cache."""
    kernels, cache = context.kernels, context.cache(SELF_ATTENTION)
    num_heads = cache.format.num_kv_heads * kernels.num_shards
    new_kv = tuple(with_copies(with_width(x, cache.format.head_dim), num_heads) for x in (k, v))

    def write(k: jax.Array, v: jax.Array, pages: Pages, slots: jax.Array) -> Pages:
        view = pallas_kernels.kv_scatter(
            cache.format.view(pages, cache.block_size),
            *(k, v, slots, cache.row),
            kv_dtype=cache.format.kv_dtype(pages),
            implementation=kernels.implementation,
            target=kernels.target,
        )
        return cache.format.unview(view, pages)

    return kernels.by_device(
        *(write, *new_kv, pages, cache.slots),
        in_specs=(TOKENS_BY_HEAD, TOKENS_BY_HEAD, PAGES_BY_DEVICE, WHOLE),
        out_specs=PAGES_BY_DEVICE,
    )


def attend_to_positions(
    config: AttentionConfig,
    q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    positions: jax.Array,  # i32[num_queries, num_positions], see `sparse_paged_attention`
    pages: Pages,
    context: LayerContext,
) -> jax.Array:  # f[num_queries, num_q_heads, v_head_dim]
    """Attends to the given positions only. The step's keys and values must be in the cache."""
    kernels, cache = context.kernels, context.cache(SELF_ATTENTION)

    def attend(
        q: jax.Array, positions: jax.Array, pages: Pages, *sequences: jax.Array
    ) -> jax.Array:
        return pallas_kernels.sparse_paged_attention(
            *(q, cache.format.view(pages, cache.block_size), cache.row, *sequences, positions),
            scale=config.scale,
            kv_dtype=cache.format.kv_dtype(pages),
            batch_invariant=kernels.batch_invariant,
            implementation=kernels.implementation,
            target=kernels.target,
        )

    attended = kernels.by_device(
        *(attend, with_width(q, cache.format.head_dim), positions, pages),
        *(cache.block_tables, cache.seq_lens, context.query_start_loc),
        in_specs=(TOKENS_BY_HEAD, WHOLE, PAGES_BY_DEVICE, *[WHOLE] * 3),
        out_specs=TOKENS_BY_HEAD,
    )
    return attended[..., : config.value_head_dim]
