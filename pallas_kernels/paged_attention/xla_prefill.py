"""Attention of requests with several query tokens: a loop over (query tile, KV tile) pairs."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import (
    AttentionProblem,
    RunningSoftmax,
    product_f32,
    rows_at,
    running_totals,
)

# Query tokens and keys that one step of the inner loop multiplies (measured: docs/design/cpu.md).
QUERY_TILE_TOKENS = 32
KV_TILE_TOKENS = 128


def attend_prefill_rows(problem: AttentionProblem) -> tuple[jax.Array, jax.Array]:
    """Attends the query tokens of every request that has more than one.

    A tile never crosses requests. Query tokens of each request [70, 1, 64] -> tiles [2, 0, 1] ->
    ends [2, 2, 3] -> request of tiles 0..2: [0, 0, 2].

    Returns:
        Output f32[num_tokens, num_kv_heads, group_size, head_dim] and lse f32[num_tokens,
        num_kv_heads, group_size], zero and -inf for all other tokens.
    """
    num_tokens = problem.q.shape[0]
    query_tile = min(QUERY_TILE_TOKENS, num_tokens)
    num_query = problem.num_query()
    num_tiles = jnp.where(num_query > 1, lax.div(num_query + query_tile - 1, query_tile), 0)
    tile_ends = running_totals(num_tiles)  # i32[num_reqs]

    def add_tile(
        tile_idx: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        req_idx = jnp.searchsorted(tile_ends, tile_idx, side="right", method="compare_all")
        tile_of_req = tile_idx - rows_at(tile_ends - num_tiles, req_idx)
        query_idx = tile_of_req * query_tile + jnp.arange(query_tile, dtype=jnp.int32)
        num_query_of_req = rows_at(num_query, req_idx)
        is_query = query_idx < num_query_of_req  # bool[query_tile]
        token_idx = rows_at(problem.query_start_loc, req_idx) + query_idx
        # Without causal masking, every token sees the same keys as the last token.
        offset = query_idx - num_query_of_req if problem.is_causal else -jnp.ones_like(query_idx)
        position = rows_at(problem.seq_lens, req_idx) + offset
        if problem.key_limits is not None:
            # The last of the tile's tokens sees the most keys.
            last_key = rows_at(problem.seq_lens, req_idx) - 1
            own = problem.last_seen(jnp.minimum(token_idx, num_tokens - 1), position)
            position = jnp.where(is_query, own, last_key)
        written_idx = jnp.where(is_query, token_idx, num_tokens)
        tile_results = _attend_tile(problem, req_idx, token_idx, position)
        out, lse = (
            result.at[written_idx].set(tile_result, mode="drop", wrap_negative_indices=False)
            for result, tile_result in zip(results, tile_results, strict=True)
        )
        return out, lse

    out = jnp.zeros(problem.out_shape, jnp.float32)
    lse = jnp.full(problem.out_shape[:-1], -jnp.inf, jnp.float32)
    return lax.fori_loop(0, tile_ends[-1], add_tile, (out, lse))


def _attend_tile(
    problem: AttentionProblem,
    req_idx: jax.Array,  # i32[]
    token_idx: jax.Array,  # i32[query_tile], may run past the request's tokens
    position: jax.Array,  # i32[query_tile], may run past the sequence
) -> tuple[jax.Array, jax.Array]:
    """Attends one tile of one request's query tokens to its cached tokens.

    Returns:
        f32[query_tile, num_kv_heads, group_size, head_dim], f32[query_tile, num_kv_heads,
        group_size].
    """
    num_tokens, num_kv_heads, group_size, head_dim = problem.q.shape
    max_blocks_per_req = problem.block_tables.shape[1]
    block_size = problem.block_size
    tile_blocks = min(max(1, KV_TILE_TOKENS // block_size), max_blocks_per_req)
    kv_tile = tile_blocks * block_size
    query_tile = token_idx.shape[0]

    readable_idx = jnp.minimum(token_idx, num_tokens - 1)
    q = rows_at(problem.q, readable_idx)
    factors = problem.factors_at(readable_idx)
    # The query heads of a KV head are rows of one product.
    q = q.transpose(1, 2, 0, 3).reshape(num_kv_heads, group_size * query_tile, head_dim)

    def add_tile(tile_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        logical_block = tile_idx * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
        first_key = logical_block * block_size
        holds_seen = first_key < rows_at(problem.seq_lens, req_idx)
        holds_seen &= first_key + block_size > problem.first_seen(position[0])
        block_ids = rows_at(
            problem.block_tables, req_idx, jnp.minimum(logical_block, max_blocks_per_req - 1)
        )
        k, v = problem.gather_blocks(block_ids, holds_seen)
        key_position = tile_idx * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)
        is_written = key_position < rows_at(problem.seq_lens, req_idx)
        is_written &= key_position >= problem.first_seen(position[0])
        is_seen = key_position[None, :] <= position[:, None]  # bool[query_tile, kv_tile]
        is_seen &= key_position[None, :] >= problem.first_seen(position)[:, None]
        distance = key_position[None, :] - position[:, None]
        return add_kv_tile(problem, softmax, q, factors, k, v, is_written, is_seen, distance)

    end_position = jnp.minimum(position[-1] + 1, rows_at(problem.seq_lens, req_idx))
    first_tile = lax.div(problem.first_seen(position[0]), kv_tile)
    end_tile = lax.div(end_position + kv_tile - 1, kv_tile)
    empty = problem.empty_softmax((), (query_tile,))
    out, lse = lax.fori_loop(first_tile, end_tile, add_tile, empty).result()
    return out.transpose(2, 0, 1, 3), lse.transpose(2, 0, 1)


def add_kv_tile(
    problem: AttentionProblem,
    softmax: RunningSoftmax,  # f32[num_kv_heads, group_size, query_tile]
    q: jax.Array,  # f[num_kv_heads, group_size * query_tile, head_dim]
    factors: jax.Array | None,  # f32[query_tile, num_kv_heads, group_size, num_profiles]
    k: jax.Array,  # f[tile_blocks, num_kv_heads, block_size, head_dim]
    v: jax.Array,  # f[tile_blocks, num_kv_heads, block_size, head_dim]
    is_written: jax.Array,  # bool[kv_tile], keys that may be read
    is_seen: jax.Array,  # bool[query_tile, kv_tile], only keys that may be read
    distance: jax.Array,  # i32[query_tile, kv_tile], key positions minus query positions
) -> RunningSoftmax:
    """Adds one tile of keys to the running softmax of one tile of query tokens."""
    shape = softmax.largest.shape
    num_kv_heads = shape[0]
    kv_tile = is_written.shape[0]
    k = k.transpose(1, 0, 2, 3).reshape(num_kv_heads, kv_tile, -1)
    v = v.transpose(1, 0, 2, 3).reshape(num_kv_heads, kv_tile, -1)
    # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
    v = jnp.where(is_written[None, :, None], v, 0)

    products = product_f32("hqd,hkd->hqk", q, k).reshape(*shape, kv_tile)
    bias = None
    if factors is not None:
        bias = product_f32("qhgr,qkr->hgqk", factors, problem.biases_at(distance))
    logits = problem.logits(products, is_seen, distance, head_axis=0, bias=bias)

    largest = jnp.maximum(softmax.largest, logits.max(axis=-1))
    rescale = jnp.exp(softmax.largest - largest)
    # A query token that has seen no key yet has equal logits, and exp alone would give 1.
    weights = jnp.where(is_seen, jnp.exp(logits - largest[..., None]), 0)
    rows = problem.as_weights(weights).reshape(num_kv_heads, -1, kv_tile)
    sums = product_f32("hqk,hkd->hqd", rows, v).reshape(*shape, -1)
    return RunningSoftmax(
        largest,
        softmax.denominator * rescale + weights.sum(axis=-1),
        softmax.weighted_values * rescale[..., None] + sums,
    )
