"""Body of `paged_attention` on Hopper GPUs: two Mosaic GPU kernels whose results are combined.

The decode kernel computes requests with one query token; it is built to read memory at full speed.
The ragged kernel computes longer requests; it is built to fill the matrix units. For each token, a
select takes the result of the kernel that computed it.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.alibi import ALIBI_MISFIT
from pallas_kernels.paged_attention.distance_bias import DISTANCE_BIAS_MISFIT
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_misfit, decode_rows_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu_ragged import ragged_misfit, ragged_rows_mosaic_gpu
from pallas_kernels.stored_dtype import BITS_DTYPE


def misfit(
    q: jax.Array,
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    distance_factors: jax.Array | None = None,
    distance_profiles: jax.Array | None = None,
) -> str | None:
    """Why this body cannot do a call; None if it can. Only shapes and static arguments matter."""
    del row, block_tables, seq_lens, query_start_loc
    del is_causal, sliding_window, chunk_size, soft_cap, sinks, distance_profiles
    if alibi_slopes is not None:
        return ALIBI_MISFIT
    if distance_factors is not None:
        return DISTANCE_BIAS_MISFIT
    if kv_dtype is not None:
        return f"only XLA on the CPU needs 16-bit floats stored as {BITS_DTYPE}"
    reason = decode_misfit(q, kv_cache)
    if reason is None and max_query_len != 1:
        reason = ragged_misfit(q, kv_cache, scale=scale)
    return reason


def paged_attention_mosaic_gpu(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # f[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
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
    sinks: jax.Array | None,  # f[num_q_heads]
    alibi_slopes: None,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`; `interpret` is False, True or `plgpu.InterpretGPUParams`."""
    # `misfit` rejects calls with slopes, and caches of uint16.
    del alibi_slopes, kv_dtype
    num_tokens = q.shape[0]
    num_reqs = block_tables.shape[0]
    row = jnp.asarray(row, jnp.int32)
    rules = {
        "scale": scale,
        "sliding_window": sliding_window,
        "chunk_size": chunk_size,
        "soft_cap": soft_cap,
        # True would mean the interpreter of another backend.
        "interpret": plgpu.InterpretGPUParams() if interpret is True else interpret,
    }

    # query_start_loc [0, 1, 1, 4] -> is_single [True, False, False] -> of tokens 0 to 5, the last
    # being padding: request [0, 2, 2, 2, 3, 3].
    num_query = query_start_loc[1:] - query_start_loc[:-1]
    is_single = num_query == 1  # bool[num_reqs]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token[:, None], axis=1)  # i32[num_tokens]
    is_padding = req_idx == num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)

    # A single query token is at the last position, so `is_causal` makes no difference.
    out, lse = decode_rows_mosaic_gpu(
        q[jnp.clip(query_start_loc[:-1], 0, num_tokens - 1)],
        *(kv_cache, row, block_tables),
        jnp.where(is_single, seq_lens, 0),
        **rules,
    )
    out, lse = out[req_idx], lse[req_idx]  # f32[num_tokens, num_q_heads, head_dim] and [:2]
    if max_query_len != 1:
        ragged_out, ragged_lse = ragged_rows_mosaic_gpu(
            *(q, kv_cache, row, block_tables, seq_lens, query_start_loc),
            is_causal=is_causal,
            skip_single=True,
            **rules,
        )
        is_single_token = is_single[req_idx]
        out = jnp.where(is_single_token[:, None, None], out, ragged_out.astype(jnp.float32))
        lse = jnp.where(is_single_token[:, None], lse, ragged_lse)

    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks.astype(jnp.float32))
    # This select comes last: rows that no kernel wrote may hold anything, NaN included.
    sees_any = ~is_padding & (seq_lens[req_idx] > 0)  # bool[num_tokens]
    out = jnp.where(sees_any[:, None, None], out, 0.0).astype(q.dtype)
    return out, jnp.where(sees_any[:, None], lse, -jnp.inf)


def _add_sinks(
    out: jax.Array,  # f32[num_tokens, num_q_heads, head_dim]
    lse: jax.Array,  # f32[num_tokens, num_q_heads]
    sinks: jax.Array,  # f32[num_q_heads]
) -> tuple[jax.Array, jax.Array]:
    """Adds exp(sink) to each softmax's denominator, and nothing to its sum of values."""
    lse_with_sink = jnp.logaddexp(lse, sinks)
    return out * jnp.exp(lse - lse_with_sink)[..., None], lse_with_sink
