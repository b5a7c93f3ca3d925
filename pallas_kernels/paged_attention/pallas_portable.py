"""Simple Pallas body of `paged_attention`, one grid step a token. Runs in interpret mode only."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

# Finite, because -inf minus -inf is NaN.
MASKED_LOGIT = -1e30

_Softmax = tuple[jax.Array, jax.Array, jax.Array]


def _token_kernel(
    row_ref: jax.Array,  # i32[1]
    req_idx_ref: jax.Array,  # i32[num_tokens]
    position_ref: jax.Array,  # i32[num_tokens], -1 for tokens that see nothing
    block_tables_ref: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    sinks_ref: jax.Array,  # f32[num_kv_heads, group_size]
    q_ref: jax.Array,  # f[num_tokens, num_kv_heads, group_size, head_dim]
    k_cache_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    out_ref: jax.Array,  # f[num_tokens, num_kv_heads, group_size, v_head_dim]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    _, _, num_kv_heads, block_size, v_head_dim = v_cache_ref.shape
    group_size = q_ref.shape[2]
    token_idx = pl.program_id(0)
    row = row_ref[0]
    req_idx = req_idx_ref[token_idx]
    position = position_ref[token_idx]
    q = q_ref[token_idx].astype(jnp.float32)  # f32[num_kv_heads, group_size, head_dim]
    first_seen = 0 if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)

    def add_block(logical_block: jax.Array, softmax: _Softmax) -> _Softmax:
        largest, denominator, weighted_values = softmax
        block_id = block_tables_ref[req_idx, logical_block]
        key_position = logical_block * block_size + jnp.arange(block_size)
        is_seen = (key_position <= position) & (key_position >= first_seen)
        k = k_cache_ref[row, block_id].astype(jnp.float32)
        # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
        v = jnp.where(is_seen[:, None], v_cache_ref[row, block_id].astype(jnp.float32), 0.0)
        logits = scale * jnp.einsum("hgd,hkd->hgk", q, k, precision=lax.Precision.HIGHEST)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(is_seen, logits, MASKED_LOGIT)
        new_largest = jnp.maximum(largest, logits.max(axis=-1))
        rescale = jnp.exp(largest - new_largest)
        weights = jnp.where(is_seen, jnp.exp(logits - new_largest[..., None]), 0.0)
        values = jnp.einsum("hgk,hkd->hgd", weights, v, precision=lax.Precision.HIGHEST)
        return (
            new_largest,
            denominator * rescale + weights.sum(axis=-1),
            weighted_values * rescale[..., None] + values,
        )

    heads = (num_kv_heads, group_size)
    start = (
        sinks_ref[...] if has_sinks else jnp.full(heads, MASKED_LOGIT, jnp.float32),
        jnp.full(heads, 1.0 if has_sinks else 0.0, jnp.float32),
        jnp.zeros((*heads, v_head_dim), jnp.float32),
    )
    first_block = first_seen // block_size
    end_block = (position + block_size) // block_size
    _, denominator, weighted_values = lax.fori_loop(first_block, end_block, add_block, start)
    divisor = jnp.where(denominator > 0, denominator, 1.0)[..., None]
    out_ref[token_idx] = (weighted_values / divisor).astype(out_ref.dtype)


def paged_attention_pallas(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,  # f[num_q_heads]
) -> jax.Array:  # f[num_tokens, num_q_heads, v_head_dim]
    """See `api.paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    heads = (num_kv_heads, num_q_heads // num_kv_heads)
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    req_idx = jnp.searchsorted(query_start_loc[1:], token_idx, side="right")
    is_padding = req_idx == seq_lens.shape[0]
    req_idx = jnp.minimum(req_idx, seq_lens.shape[0] - 1).astype(jnp.int32)
    position = seq_lens[req_idx] - (query_start_loc[req_idx + 1] - token_idx)
    # -1 makes the loop over blocks empty.
    position = jnp.where(is_padding, -1, jnp.maximum(position, -1))
    sink_logits = jnp.zeros(heads) if sinks is None else sinks.astype(jnp.float32).reshape(heads)
    out = pl.pallas_call(
        functools.partial(
            _token_kernel,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, *heads, v_cache.shape[-1]), q.dtype),
        grid=(num_tokens,),
        interpret=True,
        name="paged_attention",
    )(
        jnp.asarray(row, jnp.int32).reshape(1),
        req_idx,
        position,
        block_tables,
        sink_logits,
        q.reshape(num_tokens, *heads, head_dim),
        k_cache,
        v_cache,
    )
    return out.reshape(num_tokens, num_q_heads, -1)
