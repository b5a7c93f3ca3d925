"""Plain-JAX body of `sparse_paged_attention`. See `pallas_kernels/chosen_positions.py`."""

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


def sparse_paged_attention_xla(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, num_positions]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
) -> jax.Array:  # f[num_tokens, num_q_heads, head_dim]
    """See `api.sparse_paged_attention`."""
    num_tokens, _, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)

    def add_keys(
        softmax: RunningSoftmax,  # f32[tile, num_kv_heads, group_size]
        q: jax.Array,  # f[tile, num_kv_heads, group_size, head_dim]
        keys: ChosenKeys,
    ) -> RunningSoftmax:
        def read(part: int) -> jax.Array:  # f[tile, key_tile, num_kv_heads, head_dim]
            pages = 2 * keys.block_ids[:, :, None] + part
            stored = rows_at(kv_cache, row, pages, heads, keys.offsets[:, :, None])
            return jnp.where(keys.is_seen[:, :, None, None], as_values(stored, kv_dtype), 0)

        k, v = read(0), read(1)
        is_seen = keys.is_seen[:, None, None, :]
        logits = jnp.where(is_seen, product_f32("thgd,tkhd->thgk", q, k) * scale, MASKED_LOGIT)
        # In the wider of the dtypes of q and of the cache: see `AttentionProblem.as_weights`.
        dtype = jnp.promote_types(q.dtype, v.dtype)
        return softmax.add(
            logits,
            is_seen,
            lambda weights: product_f32("thgk,tkhd->thgd", weights.astype(dtype), v),
        )

    out = attend_to_positions(
        add_keys,
        q.reshape(num_tokens, num_kv_heads, -1, head_dim),
        *(block_tables, seq_lens, query_start_loc, positions),
        block_size=block_size,
        value_dim=head_dim,
        batch_invariant=batch_invariant,
    )
    return out.reshape(q.shape).astype(q.dtype)
