"""Fast plain-JAX body of `paged_attention`: two loops whose trip counts follow the real work.

Requests with one query token share a loop over the blocks that exist; longer ones go through a
loop over tiles. Both find their work on the device, so the cost does not depend on the longest
context, and one compiled program serves every mix.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla_decode import attend_decode_rows
from pallas_kernels.paged_attention.xla_prefill import attend_prefill_rows
from pallas_kernels.paged_attention.xla_problem import AttentionProblem


def paged_attention_xla(
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
    sinks: jax.Array | None,  # f[num_q_heads]
    alibi_slopes: jax.Array | None,  # f32[num_q_heads]
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2]
    heads = (num_kv_heads, num_q_heads // num_kv_heads)
    problem = AttentionProblem(
        q=q.reshape(num_tokens, *heads, head_dim),
        kv_cache=kv_cache,
        kv_dtype=kv_dtype,
        row=row,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.reshape(heads),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.reshape(heads),
    )
    out, lse = attend_all_rows(problem, max_query_len)
    return out.reshape(num_tokens, num_q_heads, -1).astype(q.dtype), lse.reshape(num_tokens, -1)


def attend_all_rows(
    problem: AttentionProblem, max_query_len: int | None
) -> tuple[jax.Array, jax.Array]:
    """Attends all query tokens.

    Returns:
        Output f32[num_tokens, num_kv_heads, group_size, value_dim] and lse f32[num_tokens,
        num_kv_heads, group_size].
    """
    if max_query_len == 1:
        out = jnp.zeros(problem.out_shape, jnp.float32)
        lse = jnp.full(problem.out_shape[:-1], -jnp.inf, jnp.float32)
    else:
        out, lse = attend_prefill_rows(problem)
    # In a step with prompts there is little to gain: their products take most of the time.
    decode_out, decode_lse, is_decode = attend_decode_rows(
        problem, looks_for_shared_prefix=max_query_len == 1
    )
    query_token = jnp.where(is_decode, problem.query_start_loc[:-1], problem.q.shape[0])
    out = out.at[query_token].set(decode_out, mode="drop", wrap_negative_indices=False)
    lse = lse.at[query_token].set(decode_lse, mode="drop", wrap_negative_indices=False)
    return out, lse
