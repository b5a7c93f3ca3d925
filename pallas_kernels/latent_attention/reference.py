"""Reference body of `latent_attention`: every token against its whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values


def latent_attention_reference(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.latent_attention`."""
    del max_query_len  # every token is computed alike
    num_tokens, _, latent_dim = q_latent.shape
    rope_dim = q_rope.shape[-1]
    num_blocks, width = kv_cache.shape[1], kv_cache.shape[-1]
    num_reqs = block_tables.shape[0]

    # query_start_loc [0, 2, 2, 5] -> request of each token [0, 0, 2, 2, 2], then 3 (padding).
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)  # i32[num_tokens]
    is_padding = req_idx == num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)
    tokens_after = query_start_loc[req_idx + 1] - token_idx  # the token itself included
    position = seq_lens[req_idx] - tokens_after  # i32[num_tokens]
    if key_limits is not None:
        position = key_limits - 1

    # f32[num_tokens, max_len, width]: each token's own copy of its cached vectors.
    tables = jnp.clip(block_tables[req_idx], 0, num_blocks - 1)
    cached = as_values(kv_cache[row, :, 0], kv_dtype)[tables]
    cached = cached.reshape(num_tokens, -1, width).astype(jnp.float32)
    key_position = jnp.arange(cached.shape[1])
    is_seen = key_position[None, :] <= position[:, None]  # bool[num_tokens, max_len]
    is_seen &= (seq_lens[req_idx] > 0)[:, None] & ~is_padding[:, None]
    # Unwritten memory may hold NaN, and 0 * NaN is NaN: values are masked, not only their weights.
    latents = jnp.where(is_seen[:, :, None], cached[..., :latent_dim], 0.0)
    rope_keys = cached[..., latent_dim : latent_dim + rope_dim]

    def product(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        lhs = lhs.astype(jnp.float32)
        return jnp.einsum(subscripts, lhs, rhs, precision=lax.Precision.HIGHEST)

    logits = product("thd,tkd->thk", q_latent, latents)
    logits = scale * (logits + product("thd,tkd->thk", q_rope, rope_keys))
    sees_any = jnp.any(is_seen, axis=-1)[:, None, None]
    # A softmax of -inf alone is NaN. Tokens that see no key get zeros here; `sees_any` masks them.
    logits = jnp.where(is_seen[:, None, :], logits, jnp.where(sees_any, -jnp.inf, 0.0))
    out = product("thk,tkd->thd", jax.nn.softmax(logits, axis=-1), latents)
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(logits, axis=-1), -jnp.inf)
    return jnp.where(sees_any, out, 0.0).astype(q_latent.dtype), lse
