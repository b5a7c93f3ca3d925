"""Plain-JAX body of `sparse_latent_attention`. See `pallas_kernels/chosen_positions.py`."""

import jax
import jax.numpy as jnp

from pallas_kernels.chosen_positions import ChosenKeys, attend_to_positions
from pallas_kernels.paged_attention.xla_problem import (
    MASKED_LOGIT,
    RunningSoftmax,
    product_f32,
    rows_at,
)
from pallas_kernels.stored_dtype import as_values


def sparse_latent_attention_xla(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, top_k]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
) -> jax.Array:  # f[num_tokens, num_q_heads, latent_dim]
    """See `api.sparse_latent_attention`."""
    latent_dim = q_latent.shape[2]
    # Without the axis of size 1, for which XLA on the CPU chooses another layout. A program that
    # last wrote through another view of the pages would then copy the whole cache.
    stored = kv_cache.reshape(*kv_cache.shape[:2], *kv_cache.shape[3:])

    def add_keys(
        softmax: RunningSoftmax,  # f32[tile, num_q_heads]
        q: jax.Array,  # f[tile, num_q_heads, latent_dim + rope_dim]
        keys: ChosenKeys,
    ) -> RunningSoftmax:
        vectors = as_values(rows_at(stored, row, keys.block_ids, keys.offsets), kv_dtype)
        vectors = jnp.where(keys.is_seen[:, :, None], vectors[..., : q.shape[-1]], 0)
        is_seen = keys.is_seen[:, None, :]
        logits = jnp.where(is_seen, product_f32("thd,tkd->thk", q, vectors) * scale, MASKED_LOGIT)
        # In the wider of the dtypes of q and of the cache: see `AttentionProblem.as_weights`.
        dtype = jnp.promote_types(q.dtype, vectors.dtype)
        latents = vectors[..., :latent_dim]
        return softmax.add(
            logits,
            is_seen,
            lambda weights: product_f32("thk,tkd->thd", weights.astype(dtype), latents),
        )

    out = attend_to_positions(
        add_keys,
        jnp.concatenate([q_latent, q_rope], axis=-1),
        *(block_tables, seq_lens, query_start_loc, positions),
        block_size=kv_cache.shape[3],
        value_dim=latent_dim,
        batch_invariant=batch_invariant,
    )
    return out.astype(q_latent.dtype)
