"""Reference body of `sparse_paged_attention`: a mask over the whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values


def sparse_paged_attention_reference(
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
    del batch_invariant  # every token is computed alike
    num_tokens, num_q_heads, head_dim = q.shape
    num_blocks, num_kv_heads = kv_cache.shape[1] // 2, kv_cache.shape[2]
    num_reqs = block_tables.shape[0]
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)
    is_used = req_idx < num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)

    # f32[num_tokens, max_len, num_q_heads, head_dim]: each token's own copy of its sequence.
    tables = jnp.clip(block_tables[req_idx], 0, num_blocks - 1)

    def read(part: int) -> jax.Array:
        blocks = as_values(kv_cache[row], kv_dtype)[2 * tables + part].astype(jnp.float32)
        heads = blocks.swapaxes(2, 3).reshape(num_tokens, -1, num_kv_heads, head_dim)
        return jnp.repeat(heads, num_q_heads // num_kv_heads, axis=2)

    k, v = read(0), read(1)
    key_position = jnp.arange(k.shape[1])
    is_seen = (positions[:, :, None] == key_position).any(axis=1)
    is_seen &= is_used[:, None] & (key_position < seq_lens[req_idx][:, None])
    # Unwritten memory may hold NaN, and 0 * NaN is NaN: values are masked, not only their weights.
    k, v = (jnp.where(is_seen[:, :, None, None], x, 0.0) for x in (k, v))

    def product(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, lhs, rhs, precision=lax.Precision.HIGHEST)

    logits = scale * product("thd,tkhd->thk", q.astype(jnp.float32), k)
    sees_any = is_seen.any(axis=-1)[:, None, None]
    logits = jnp.where(is_seen[:, None, :], logits, jnp.where(sees_any, -jnp.inf, 0.0))
    out = product("thk,tkhd->thd", jax.nn.softmax(logits, axis=-1), v)
    return jnp.where(sees_any, out, 0.0).astype(q.dtype)
