"""Public op `paged_attention`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_at_least,
    require_float,
    require_int32,
    require_shape,
)
from pallas_kernels.cache_layout import check_kv_caches, check_row
from pallas_kernels.dispatch import select_body
from pallas_kernels.paged_attention.pallas_portable import paged_attention_pallas
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla

_BODIES = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    "pallas_interpret": paged_attention_pallas,
}


def paged_attention(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[num_q_heads]
    implementation: str | None = None,
) -> jax.Array:  # f[num_tokens, num_q_heads, v_head_dim], q.dtype
    """Attends each request's query tokens, causally by position, to its own cached tokens.

    The batch is ragged: prompts, chunks of prompts, single decode tokens and empty requests in
    any order. A request's query tokens are the last positions of its sequence: with seq_len 10 and
    3 query tokens they stand at positions 7, 8, 9. A token at position p reads positions j <= p,
    and with a window w only j > p - w. Query head h reads KV head
    `h // (num_q_heads // num_kv_heads)`.

    Args:
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        block_tables: Physical block of each logical block, in `[0, num_blocks)`. Entries past a
            sequence's end, or wholly left of its window, may hold anything, and so may all memory
            that was never written, NaN included: none of it reaches the result.
        seq_lens: Tokens in the cache after this step's write, in
            `[0, max_blocks_per_req * block_size]`; 0 is an empty request.
        query_start_loc: Starts at 0, non-decreasing; request r owns tokens
            `[query_start_loc[r], query_start_loc[r + 1])`, at most `seq_lens[r]` of them. Tokens
            from the last entry on are padding.
        scale: Factor of the logits, usually `head_dim ** -0.5`.
        sliding_window: Positions a token sees, itself included; `None` is all.
        soft_cap: `logits = soft_cap * tanh(logits / soft_cap)`, after the scale, before the mask.
        sinks: One more logit a head in the softmax's denominator, with no value.
        implementation: `None` picks the fastest body on this platform.

    Returns:
        Attention output; zero for padding tokens and for tokens of empty requests.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; sinks: gpt-oss.
    """
    body = select_body("paged_attention", _BODIES, implementation)
    _check_arrays(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    check_row("paged_attention", row, num_rows=k_cache.shape[0])
    if sliding_window is not None:
        require_at_least("paged_attention", "sliding_window", sliding_window, 1)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(
            f"paged_attention: soft_cap is out of range: got {soft_cap}, "
            "wanted more than 0 or None."
        )
    if sinks is not None:
        require_shape("paged_attention", "sinks", sinks, (q.shape[1],))
        require_float("paged_attention", sinks=sinks)
    return body(
        q,
        k_cache,
        v_cache,
        jnp.asarray(row, jnp.int32),
        block_tables,
        seq_lens,
        query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def _check_arrays(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
) -> None:
    op_name = "paged_attention"
    check_kv_caches(op_name, k_cache, v_cache)
    _, _, num_kv_heads, _, head_dim = k_cache.shape
    require_shape(op_name, "q", q, ("num_tokens", "num_q_heads", head_dim))
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"{op_name}: q has the wrong number of heads: got {q.shape[1]}, "
            f"wanted a multiple of the cache's num_kv_heads={num_kv_heads}."
        )
    require_shape(op_name, "block_tables", block_tables, ("num_reqs", "max_blocks_per_req"))
    num_reqs = block_tables.shape[0]
    require_shape(op_name, "seq_lens", seq_lens, (num_reqs,))
    require_shape(op_name, "query_start_loc", query_start_loc, (num_reqs + 1,))
    require_float(op_name, q=q, k_cache=k_cache, v_cache=v_cache)
    require_int32(
        op_name, block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc
    )
