"""The part of attention that has no weights: it writes and reads the pages of the KV cache."""

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION, AttentionConfig
from models.forward.kernel_settings import BY_HEAD, PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.forward.layer_context import LayerContext


def attend(
    config: AttentionConfig,
    q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    new_kv: tuple[jax.Array, jax.Array] | None,
    pages: Pages,
    context: LayerContext,
    *,
    sinks: jax.Array | None = None,  # f[num_q_heads]
    distance_bias: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, v_head_dim]
    """Writes the step's keys and values into the layer's cache, and attends to the cache.

    Args:
        new_kv: Keys f[num_tokens, num_kv_heads, head_dim] and values
            f[num_tokens, num_kv_heads, v_head_dim]. None if the cache belongs to an earlier layer,
            which has written them already.
        sinks: One more logit per head in the softmax's denominator. None: there are no sinks.
        distance_bias: `distance_factors` and `distance_profiles` of `paged_attention`. None: no
            bias is added.

    Returns:
        Attention's output for each query head, and the pages with the new keys and values.
    """
    kernels, cache = context.kernels, context.cache(SELF_ATTENTION)
    width = cache.format.head_dim
    chosen = {
        "kv_dtype": cache.format.kv_dtype(pages),
        "implementation": kernels.implementation,
        "target": kernels.target,
    }
    pad_slot = pallas_kernels.pad_slot(*pages.shape[:2], cache.block_size)
    slopes = None
    if config.alibi_slopes is not None:
        slopes = jnp.asarray(config.alibi_slopes, jnp.float32)

    def of_own_heads(
        q: jax.Array,
        new_kv: tuple[jax.Array, jax.Array] | None,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
        factors: jax.Array | None,
        profiles: jax.Array | None,
        pages: Pages,
        slots: jax.Array,
        positions: jax.Array,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        query_start_loc: jax.Array,
    ) -> tuple[jax.Array, Pages]:
        view = cache.format.view(pages, cache.block_size)
        if new_kv is not None:
            slots = kernels.context_ranks.own_slots(slots, positions, pad_slot)
            view = pallas_kernels.kv_scatter(view, *new_kv, slots, cache.row, **chosen)

        def of_own_keys(
            q: jax.Array, seq_lens: jax.Array, **options: Any
        ) -> jax.Array | tuple[jax.Array, jax.Array]:
            return pallas_kernels.paged_attention(
                *(q, view, cache.row, block_tables, seq_lens, query_start_loc),
                scale=config.scale,
                sliding_window=config.sliding_window,
                chunk_size=config.chunk_size,
                soft_cap=config.soft_cap,
                sinks=sinks,
                alibi_slopes=slopes,
                distance_factors=factors,
                distance_profiles=profiles,
                max_query_len=context.num_queries_per_req,
                batch_invariant=kernels.batch_invariant,
                **chosen,
                **options,
            )

        attended = kernels.context_ranks.attend(
            *(of_own_keys, (q,), seq_lens, query_start_loc),
            max_query_len=context.num_queries_per_req,
        )
        return attended, cache.format.unview(view, pages)

    if new_kv is not None:
        num_heads = cache.format.num_kv_heads * kernels.num_shards
        new_kv = tuple(with_copies(with_width(x, width), num_heads) for x in new_kv)
    attended, pages = kernels.by_device(
        *(of_own_heads, with_width(q, width), new_kv),
        *(sinks, slopes, *(distance_bias or (None, None))),
        *(pages, cache.slots, context.batch.positions),
        *(cache.block_tables, cache.seq_lens, context.query_start_loc),
        in_specs=(
            *(TOKENS_BY_HEAD, TOKENS_BY_HEAD, *[BY_HEAD] * 2, TOKENS_BY_HEAD, WHOLE),
            *(PAGES_BY_DEVICE, *[WHOLE] * 5),
        ),
        out_specs=(TOKENS_BY_HEAD, PAGES_BY_DEVICE),
    )
    return attended[..., : config.value_head_dim], pages


def with_copies(
    heads: jax.Array,  # f[num_tokens, num_kv_heads, width]
    num_heads: int,
) -> jax.Array:  # f[num_tokens, num_heads, width]
    """If there are more devices than KV heads, repeats heads so that each device has one.

    All query heads of a device then use its KV head, because both are in the same order.
    """
    num_copies = num_heads // heads.shape[1]
    return heads if num_copies == 1 else jnp.repeat(heads, num_copies, axis=1)


def with_width(
    heads: jax.Array,  # f[num_tokens, heads, head_dim]
    width: int,
) -> jax.Array:  # f[num_tokens, heads, width]
    """Pads heads with zeros to the width in which they are stored.

    The zeros do not change the scores. The caller cuts them off the output.
    """
    return jnp.pad(heads, ((0, 0), (0, 0), (0, width - heads.shape[-1])))
