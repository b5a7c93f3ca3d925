"""Public op `cascade_attention`: two calls of `paged_attention` and a merge.

It has no bodies of its own: those of `paged_attention` do the work.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_scalar, require_shape
from pallas_kernels.cache_layout import CACHE_DIMS
from pallas_kernels.merge_attention_states.api import merge_attention_states
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import Target

_OP = "cascade_attention"


def cascade_attention(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim] or quantised
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim] likewise
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    num_common_blocks: jax.Array,  # i32[]
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[num_q_heads]
    k_scale: jax.Array | None = None,  # f32[num_kv_heads]
    v_scale: jax.Array | None = None,  # f32[num_kv_heads]
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal `paged_attention` for requests that begin with the same blocks.

    All query tokens of the batch attend to the common blocks as if they were one request's, each
    request's tokens attend to the rest of its own sequence, and the two are merged. So the common
    blocks are read once for all requests (by a body that works on tiles of query tokens: once for
    each such tile), not once for each request. Worth it for long prefixes and many requests; each
    query token is processed twice, and its output rounded to q's dtype before the merge.

    Args:
        num_common_blocks: How many leading entries of the block table are the same for every
            request that has query tokens, in `[0, max_blocks_per_req]`. A value may be too large
            for the step, and then fewer blocks are shared: a block is common here only if it lies
            wholly before every query token. 0 leaves plain paged attention.
        implementation: The body of both calls; `None` picks the fastest one on `target`.

    The other arguments and the results are those of `paged_attention`, with is_causal=True and
    without window and chunks. The rest of a table may differ, and the common entries are taken from
    the first request that has query tokens, so the others' may hold anything.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.

    Source: Hydragen, arXiv:2402.05099; `use_cascade_attention` in vLLM's flash_attn.py.
    """
    require_shape(_OP, "block_tables", block_tables, ("num_reqs", "max_blocks_per_req"))
    require_shape(_OP, "seq_lens", seq_lens, (block_tables.shape[0],))
    require_shape(_OP, "query_start_loc", query_start_loc, (block_tables.shape[0] + 1,))
    require_shape(_OP, "k_cache", k_cache, (*CACHE_DIMS, "head_dim"))
    require_scalar(_OP, "num_common_blocks", num_common_blocks)
    rules = {
        "scale": scale,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": True,
        "implementation": implementation,
        "target": target,
    }
    if not block_tables.size:  # no request, or none with a block: nothing is common
        options = rules | {"return_lse": return_lse, "sinks": sinks, "max_query_len": max_query_len}
        return paged_attention(
            *(q, k_cache, v_cache, row, block_tables, seq_lens, query_start_loc), **options
        )
    max_blocks_per_req = block_tables.shape[1]
    block_size = k_cache.shape[3]
    num_query = query_start_loc[1:] - query_start_loc[:-1]
    has_query = (num_query > 0) & (seq_lens > 0)  # bool[num_reqs]

    num_before_query = jnp.where(has_query, seq_lens - num_query, jnp.iinfo(jnp.int32).max)
    num_common = jnp.minimum(num_common_blocks, num_before_query.min() // block_size)
    num_common = jnp.clip(num_common, 0, max_blocks_per_req)
    num_common = jnp.where(jnp.any(has_query), num_common, 0)
    prefix_len = num_common * block_size

    prefix_state = paged_attention(
        *(q, k_cache, v_cache, row),
        jax.lax.dynamic_slice_in_dim(block_tables, jnp.argmax(has_query), 1),
        prefix_len[None],
        # All tokens that are not padding, as if they were one request's.
        jnp.stack([jnp.zeros_like(num_common), query_start_loc[-1]]),
        is_causal=False,
        **rules,
    )
    own_entry = jnp.arange(max_blocks_per_req, dtype=jnp.int32) + num_common
    own_state = paged_attention(
        *(q, k_cache, v_cache, row),
        # Entries past a table's end stand for positions past every sequence's end.
        block_tables[:, jnp.minimum(own_entry, max_blocks_per_req - 1)],
        jnp.maximum(seq_lens - prefix_len, 0),
        query_start_loc,
        # Every query token sees at least itself in its own part: the sink is counted there, once.
        sinks=sinks,
        max_query_len=max_query_len,
        **rules,
    )
    out, lse = merge_attention_states(*own_state, *prefix_state, target=target)
    return (out, lse) if return_lse else out
