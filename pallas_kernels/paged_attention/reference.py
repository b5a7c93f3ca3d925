"""Reference body of `paged_attention`: every token against its whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.distance_bias import distance_rows, profiles_by_distance
from pallas_kernels.stored_dtype import as_values


def paged_attention_reference(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[num_q_heads]
    alibi_slopes: jax.Array | None,  # f32[num_q_heads]
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
    distance_factors: jax.Array | None = None,  # f[num_tokens, num_q_heads, num_profiles]
    distance_profiles: jax.Array | None = None,  # f[num_profiles, num_distances]
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`."""
    del max_query_len  # every token is computed alike
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = block_tables.shape[0]
    group_size = num_q_heads // kv_cache.shape[2]

    # query_start_loc [0, 2, 2, 5] -> request of each token [0, 0, 2, 2, 2], then 3 (padding).
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)  # i32[num_tokens]
    is_padding = req_idx == num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)
    tokens_after = query_start_loc[req_idx + 1] - token_idx  # the token itself included
    position = seq_lens[req_idx] - tokens_after  # i32[num_tokens]
    if key_limits is not None:
        position = key_limits - 1

    # f32[num_tokens, num_q_heads, max_len, head_dim]: each token's own copy of its keys.
    pages = as_values(kv_cache[row], kv_dtype)
    keys = _read_sequences(pages[::2], block_tables, group_size)[req_idx]
    values = _read_sequences(pages[1::2], block_tables, group_size)[req_idx]

    key_position = jnp.arange(keys.shape[2])
    is_seen = key_position[None, :] < seq_lens[req_idx][:, None]  # bool[num_tokens, max_len]
    if is_causal:
        is_seen &= key_position[None, :] <= position[:, None]
    if sliding_window is not None:
        is_seen &= key_position[None, :] > position[:, None] - sliding_window
    if chunk_size is not None:
        is_seen &= key_position[None, :] // chunk_size == position[:, None] // chunk_size
    is_seen &= ~is_padding[:, None]

    # Unwritten memory may hold NaN, and 0 * NaN is NaN: values are masked, not only their weights.
    values = jnp.where(is_seen[:, None, :, None], values, 0.0)
    logits = scale * jnp.einsum(
        "thd,thkd->thk", q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST
    )
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    distance = key_position[None, :] - position[:, None]
    if distance_factors is not None:
        # f32[num_tokens, max_len, num_profiles]
        biases = profiles_by_distance(distance_profiles)[
            distance_rows(distance, distance_profiles.shape[1])
        ]
        factors = distance_factors.astype(jnp.float32)
        logits += jnp.einsum("thr,tkr->thk", factors, biases, precision=lax.Precision.HIGHEST)
    if alibi_slopes is not None:
        logits += alibi_slopes.astype(jnp.float32)[None, :, None] * distance[:, None, :]
    logits = jnp.where(is_seen[:, None, :], logits, -jnp.inf)
    if sinks is not None:
        sink_logit = jnp.broadcast_to(sinks[None, :, None], (num_tokens, num_q_heads, 1))
        logits = jnp.concatenate([logits, sink_logit], axis=-1)

    sees_any = jnp.any(is_seen, axis=-1)[:, None, None]
    logits = jnp.where(sees_any, logits, 0.0)
    weights = jax.nn.softmax(logits, axis=-1)[..., : keys.shape[2]]
    out = jnp.einsum("thk,thkd->thd", weights, values, precision=lax.Precision.HIGHEST)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return (
        jnp.where(sees_any, out, 0.0).astype(q.dtype),
        jnp.where(sees_any[..., 0], lse, -jnp.inf),
    )


def _read_sequences(
    pages: jax.Array,  # f[num_blocks, num_kv_heads, block_size, head_dim]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    group_size: int,
) -> jax.Array:  # f32[num_reqs, num_q_heads, max_blocks_per_req * block_size, head_dim]
    """Copies each request's blocks in order, and repeats a KV head for each of its query heads."""
    num_reqs = block_tables.shape[0]
    num_blocks, num_kv_heads, _, head_dim = pages.shape
    blocks = pages[jnp.clip(block_tables, 0, num_blocks - 1)].astype(jnp.float32)
    by_head = blocks.transpose(0, 2, 1, 3, 4).reshape(num_reqs, num_kv_heads, -1, head_dim)
    return jnp.repeat(by_head, group_size, axis=1)
