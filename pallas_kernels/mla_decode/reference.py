"""Reference body of `mla_decode`: every token against its whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def mla_decode_reference(
    q: jax.Array,  # f[num_tokens, num_q_heads, latent_dim + rope_dim]
    kv_cache: jax.Array,  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    latent_dim: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.mla_decode`."""
    num_tokens, _, cache_dim = q.shape
    num_blocks = kv_cache.shape[1]
    num_reqs = block_tables.shape[0]

    # query_start_loc [0, 1, 1, 2] -> request of each token [0, 2], then 3 (padding).
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)  # i32[num_tokens]
    is_padding = req_idx == num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)

    # f32[num_tokens, max_len, latent_dim + rope_dim]: each token's own copy of its keys.
    tables = jnp.clip(block_tables[req_idx], 0, num_blocks - 1)
    keys = kv_cache[row, :, 0][tables].reshape(num_tokens, -1, cache_dim).astype(jnp.float32)
    is_seen = jnp.arange(keys.shape[1])[None, :] < seq_lens[req_idx][:, None]
    is_seen &= ~is_padding[:, None]  # bool[num_tokens, max_len]
    # Unwritten memory may hold NaN, and 0 * NaN is NaN: values are masked, not only their weights.
    values = jnp.where(is_seen[:, :, None], keys[..., :latent_dim], 0.0)

    highest = lax.Precision.HIGHEST
    logits = scale * jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), keys, precision=highest)
    sees_any = jnp.any(is_seen, axis=-1)[:, None, None]
    # -inf alone has no softmax: tokens that see nothing get zeros here and their results below.
    logits = jnp.where(is_seen[:, None, :], logits, jnp.where(sees_any, -jnp.inf, 0.0))
    out = jnp.einsum("thk,tkd->thd", jax.nn.softmax(logits, axis=-1), values, precision=highest)
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(logits, axis=-1), -jnp.inf)
    return jnp.where(sees_any, out, 0.0).astype(q.dtype), lse
