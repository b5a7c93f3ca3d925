"""Attention of requests with one query token: a loop over one flat list of their blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_block_list import list_blocks
from pallas_kernels.paged_attention.xla_problem import (
    AttentionProblem,
    RunningSoftmax,
    product_f32,
    rows_at,
)
from pallas_kernels.paged_attention.xla_shared_prefix import (
    MIN_ROWS,
    attend_shared_prefix,
    find_shared_prefix,
)

# One step of the loop reads this many numbers of K, and as many of V. They stay in a core's cache
# until they are multiplied (docs/design/cpu.md).
CHUNK_NUMBERS = 2**17
# Each chunk has a fixed cost, and with few heads larger chunks gain nothing.
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 128, 1024
# With up to this many query heads per KV head, each head has its own product: XLA:CPU needs half
# the time of one stacked product. With more heads, both are equally fast (docs/design/cpu.md).
MAX_SEPARATE_HEADS = 8
# Writes past the last row are dropped. No index is negative (`rows_at`).
_DROPPED = {"mode": "drop", "wrap_negative_indices": False}


def attend_decode_rows(
    problem: AttentionProblem, *, looks_for_shared_prefix: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends the query token of every request that has exactly one.

    Args:
        looks_for_shared_prefix: Read leading blocks that many requests hold once for all of them.
            The code for it takes time to compile.

    Returns:
        Output f32[num_reqs, num_kv_heads, group_size, head_dim] and lse f32[num_reqs,
        num_kv_heads, group_size], and bool[num_reqs], which requests they are for.
    """
    num_reqs, max_blocks_per_req = problem.block_tables.shape
    block_size = problem.block_size
    chunk_blocks = max(1, _chunk_tokens(problem) // block_size)
    chunk_blocks = min(chunk_blocks, num_reqs * max_blocks_per_req)

    is_decode = problem.num_query() == 1
    query_token = jnp.clip(problem.query_start_loc[:-1], 0, problem.q.shape[0] - 1)
    position = problem.last_seen(query_token, problem.seq_lens - 1)  # i32[num_reqs]
    first_needed = lax.div(problem.first_seen(position), block_size)
    # No block for position -1, of a token that sees no key.
    end_needed = lax.div(position + block_size, block_size)
    num_needed = jnp.where(is_decode, end_needed - first_needed, 0)
    q = rows_at(problem.q, query_token)  # f[num_reqs, num_kv_heads, group_size, head_dim]
    factors = problem.factors_at(query_token)
    if looks_for_shared_prefix and num_reqs >= MIN_ROWS and problem.sees_all_before:
        num_full = jnp.where(is_decode, lax.div(position + 1, block_size), 0)
        prefix = find_shared_prefix(problem.block_tables, num_full)
        start = attend_shared_prefix(problem, prefix, q, factors)
        num_shared = jnp.where(prefix.is_member, prefix.num_blocks, 0)
        first_needed, num_needed = first_needed + num_shared, num_needed - num_shared
    else:
        start = problem.empty_softmax((num_reqs,), ())
    blocks = list_blocks(problem.block_tables, first_needed, num_needed, problem.num_blocks)

    def add_chunk(chunk_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        req_idx, logical_block, is_real = blocks.chunk(
            chunk_idx * chunk_blocks, chunk_blocks, max_blocks_per_req
        )
        block_ids = rows_at(problem.block_tables, req_idx, logical_block)
        key_position = logical_block[:, None] * block_size + jnp.arange(block_size)
        query_position = rows_at(position, req_idx)[:, None]
        is_seen = key_position <= query_position  # bool[chunk_blocks, block_size]
        is_seen &= key_position >= problem.first_seen(query_position)
        distance = key_position - query_position
        return _add_blocks(
            *(problem, softmax, q, factors, req_idx, block_ids, is_real, is_seen, distance)
        )

    num_chunks = lax.div(blocks.num_entries + chunk_blocks - 1, chunk_blocks)
    softmax = lax.fori_loop(0, num_chunks, add_chunk, start)
    return *softmax.result(), is_decode


def _chunk_tokens(problem: AttentionProblem) -> int:
    _, num_kv_heads, _, head_dim = problem.q.shape
    num_tokens = CHUNK_NUMBERS // (num_kv_heads * head_dim)
    return min(max(MIN_CHUNK_TOKENS, num_tokens), MAX_CHUNK_TOKENS)


def _add_blocks(
    problem: AttentionProblem,
    softmax: RunningSoftmax,  # f32[num_reqs, num_kv_heads, group_size]
    q: jax.Array,  # f[num_reqs, num_kv_heads, group_size, head_dim]
    factors: jax.Array | None,  # f32[num_reqs, num_kv_heads, group_size, num_profiles]
    req_idx: jax.Array,  # i32[chunk_blocks]
    block_ids: jax.Array,  # i32[chunk_blocks]
    is_real: jax.Array,  # bool[chunk_blocks]
    is_seen: jax.Array,  # bool[chunk_blocks, block_size]
    distance: jax.Array,  # i32[chunk_blocks, block_size]
) -> RunningSoftmax:
    """Adds each block to the running softmax of its request."""
    k, v = problem.gather_blocks(block_ids, is_real)
    # Padding entries read the query of any request. Their sums are dropped.
    written_req = jnp.where(is_real, req_idx, problem.seq_lens.shape[0])
    # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
    v = jnp.where(is_seen[:, None, :, None], v, 0)
    block_q = rows_at(q, req_idx)  # f[chunk_blocks, num_kv_heads, group_size, head_dim]
    # f32[chunk_blocks, num_kv_heads, group_size, block_size]
    products = _by_query_head("nhgd,nhpd->nhgp", block_q, k)
    seen_of_heads, distance_of_heads = (x[:, None, None, :] for x in (is_seen, distance))
    bias = None
    if factors is not None:
        biases = problem.biases_at(distance)  # f32[chunk_blocks, block_size, num_profiles]
        bias = _by_query_head("nhgr,npr->nhgp", rows_at(factors, req_idx), biases)
    logits = problem.logits(products, seen_of_heads, distance_of_heads, head_axis=1, bias=bias)

    largest = softmax.largest.at[written_req].max(logits.max(axis=-1), **_DROPPED)
    rescale = jnp.exp(softmax.largest - largest)
    # A block on the list has a key that is seen, so `largest` is a true logit and masked weights
    # underflow to 0.
    weights = jnp.exp(logits - rows_at(largest, req_idx)[..., None])
    sums = _by_query_head("nhgp,nhpd->nhgd", problem.as_weights(weights), v)
    return RunningSoftmax(
        largest,
        (softmax.denominator * rescale).at[written_req].add(weights.sum(axis=-1), **_DROPPED),
        (softmax.weighted_values * rescale[..., None]).at[written_req].add(sums, **_DROPPED),
    )


def _by_query_head(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A product of `lhs` and `rhs`; g is the axis of the query heads of a KV head in `lhs`."""
    group_size = lhs.shape[2]
    if group_size > MAX_SEPARATE_HEADS:
        return product_f32(subscripts, lhs, rhs)
    of_head = subscripts.replace("g", "")
    products = [product_f32(of_head, lhs[:, :, g], rhs) for g in range(group_size)]
    return jnp.stack(products, axis=2)
