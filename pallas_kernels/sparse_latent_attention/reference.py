"""Reference body of `sparse_latent_attention`: a mask over the whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values


def sparse_latent_attention_reference(
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
    del batch_invariant  # every token is computed alike
    num_tokens, _, latent_dim = q_latent.shape
    num_blocks, width = kv_cache.shape[1], kv_cache.shape[-1]
    num_reqs = block_tables.shape[0]
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)
    is_used = req_idx < num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)

    # f32[num_tokens, max_len, ...]: each token's own copy of its cached vectors.
    tables = jnp.clip(block_tables[req_idx], 0, num_blocks - 1)
    cached = as_values(kv_cache[row, :, 0], kv_dtype)[tables]
    cached = cached.reshape(num_tokens, -1, width).astype(jnp.float32)
    cached = cached[..., : latent_dim + q_rope.shape[-1]]
    key_position = jnp.arange(cached.shape[1])
    is_seen = (positions[:, :, None] == key_position).any(axis=1)
    is_seen &= is_used[:, None] & (key_position < seq_lens[req_idx][:, None])
    # Unwritten memory may hold NaN, and 0 * NaN is NaN: values are masked, not only their weights.
    cached = jnp.where(is_seen[:, :, None], cached, 0.0)

    def product(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        lhs = lhs.astype(jnp.float32)
        return jnp.einsum(subscripts, lhs, rhs, precision=lax.Precision.HIGHEST)

    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    logits = scale * product("thd,tkd->thk", q, cached)
    sees_any = is_seen.any(axis=-1)[:, None, None]
    logits = jnp.where(is_seen[:, None, :], logits, jnp.where(sees_any, -jnp.inf, 0.0))
    out = product("thk,tkd->thd", jax.nn.softmax(logits, axis=-1), cached[..., :latent_dim])
    return jnp.where(sees_any, out, 0.0).astype(q_latent.dtype)
