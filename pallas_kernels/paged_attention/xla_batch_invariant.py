"""Plain-JAX body of `paged_attention` whose result for a token never depends on the other tokens.

Rounding depends on the order of sums and on the shape of products. So every token attends alone to
its own keys, in the order of positions, in tiles that begin at multiples of a fixed number of
positions. Every product has the same shape in every batch. If a token sees no key of a tile, the
tile does not change the token's bits: it adds zeros and multiplies by one.

The cost is that the tokens of a prompt do not share the keys that they read.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import (
    AttentionProblem,
    RunningSoftmax,
    make_problem,
    product_f32,
)

# Tokens that attend together, and positions of keys that they read at a time. Guesses.
QUERY_TILE = 32
MIN_KEY_TILE = 64


def paged_attention_batch_invariant(
    *arrays: jax.Array, max_query_len: int | None, **rules: object
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`."""
    del max_query_len  # all tokens are computed alike
    problem = make_problem(*arrays, **rules)
    return problem.by_query_head(*attend_rows_alike(problem))


def attend_rows_alike(problem: AttentionProblem) -> tuple[jax.Array, jax.Array]:
    """Attends all query tokens with the same instructions.

    Returns:
        Output f32[num_tokens, num_kv_heads, group_size, value_dim] and lse f32[num_tokens,
        num_kv_heads, group_size].
    """
    num_tokens = problem.q.shape[0]
    # Whole tiles: the tokens after the last one are padding.
    padding = -num_tokens % QUERY_TILE
    more_rows = ((0, padding), *[(0, 0)] * 3)
    problem = replace(problem, q=jnp.pad(problem.q, more_rows))
    if problem.distance_factors is not None:
        factors = jnp.pad(problem.distance_factors, more_rows)
        problem = replace(problem, distance_factors=factors)
    if problem.key_limits is not None:
        problem = replace(problem, key_limits=jnp.pad(problem.key_limits, (0, padding)))
    out = jnp.zeros(problem.out_shape, jnp.float32)
    lse = jnp.full(problem.out_shape[:-1], -jnp.inf, jnp.float32)

    def attend_tile(
        tile_idx: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        start = tile_idx * QUERY_TILE
        tile = _attend_tile(problem, start)
        return tuple(
            lax.dynamic_update_slice_in_dim(result, part, start, 0)
            for result, part in zip(results, tile, strict=True)
        )

    num_tiles = (problem.query_start_loc[-1] + QUERY_TILE - 1) // QUERY_TILE
    out, lse = lax.fori_loop(0, num_tiles, attend_tile, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _attend_tile(
    problem: AttentionProblem, start: jax.Array
) -> tuple[jax.Array, jax.Array]:  # f32[QUERY_TILE, num_kv_heads, group_size, head_dim], f32[...]
    """Attends the `QUERY_TILE` tokens from `start` on, all with the same instructions."""
    num_reqs, max_blocks_per_req = problem.block_tables.shape
    token_idx = start + jnp.arange(QUERY_TILE)
    q = lax.dynamic_slice_in_dim(problem.q, start, QUERY_TILE)
    factors = problem.factors_at(token_idx)
    starts = problem.query_start_loc
    req_idx = jnp.searchsorted(starts, token_idx, side="right") - 1
    req_idx = jnp.clip(req_idx, 0, num_reqs - 1)
    seq_len = problem.seq_lens[req_idx]
    is_used = (token_idx < starts[-1]) & (seq_len > 0)
    position = seq_len - 1 - (starts[req_idx + 1] - 1 - token_idx)
    position = problem.last_seen(token_idx, position)
    last_seen = position if problem.is_causal else seq_len - 1
    first_seen = problem.first_seen(position)

    block_size = problem.block_size
    tile_blocks = max(1, MIN_KEY_TILE // block_size)
    key_tile = tile_blocks * block_size
    block_tables = problem.block_tables[req_idx]  # i32[QUERY_TILE, max_blocks_per_req]
    first_tile = jnp.where(is_used, first_seen // key_tile, max_blocks_per_req).min()
    end_tile = jnp.where(is_used, last_seen // key_tile + 1, 0).max()

    def add_keys(tile_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        key_position = tile_idx * key_tile + jnp.arange(key_tile)
        is_seen = is_used[:, None] & (key_position <= last_seen[:, None])
        is_seen &= key_position >= first_seen[:, None]  # bool[QUERY_TILE, key_tile]
        logical_block = tile_idx * tile_blocks + jnp.arange(tile_blocks)
        block_ids = block_tables[:, jnp.minimum(logical_block, max_blocks_per_req - 1)]
        has_seen = is_seen.reshape(QUERY_TILE, tile_blocks, block_size).any(axis=2)
        distance = key_position - position[:, None]
        return _add_keys(problem, softmax, q, factors, block_ids, has_seen, is_seen, distance)

    empty = problem.empty_softmax((QUERY_TILE,), ())
    out, lse = lax.fori_loop(first_tile, end_tile, add_keys, empty).result()
    return jnp.where(is_used[:, None, None, None], out, 0), jnp.where(
        is_used[:, None, None], lse, -jnp.inf
    )


def _add_keys(
    problem: AttentionProblem,
    softmax: RunningSoftmax,  # f32[QUERY_TILE, num_kv_heads, group_size]
    q: jax.Array,  # f[QUERY_TILE, num_kv_heads, group_size, head_dim]
    factors: jax.Array | None,  # f32[QUERY_TILE, num_kv_heads, group_size, num_profiles]
    block_ids: jax.Array,  # i32[QUERY_TILE, tile_blocks]
    has_seen: jax.Array,  # bool[QUERY_TILE, tile_blocks], whether a key of the block is seen
    is_seen: jax.Array,  # bool[QUERY_TILE, key_tile]
    distance: jax.Array,  # i32[QUERY_TILE, key_tile]
) -> RunningSoftmax:
    k, v = (_by_position(x) for x in problem.gather_blocks(block_ids, has_seen))
    # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
    v = jnp.where(is_seen[:, None, :, None], v, 0)
    products = product_f32("thgd,thpd->thgp", q, k)
    seen_of_heads, distance_of_heads = (x[:, None, None, :] for x in (is_seen, distance))
    bias = None
    if factors is not None:
        bias = product_f32("thgr,tpr->thgp", factors, problem.biases_at(distance))
    logits = problem.logits(products, seen_of_heads, distance_of_heads, head_axis=1, bias=bias)
    return softmax.add(
        logits,
        seen_of_heads,
        lambda weights: product_f32("thgp,thpd->thgd", problem.as_weights(weights), v),
    )


def _by_position(
    blocks: jax.Array,  # f[QUERY_TILE, tile_blocks, num_kv_heads, block_size, head_dim]
) -> jax.Array:  # f[QUERY_TILE, num_kv_heads, key_tile, head_dim]
    num_tokens, _, num_kv_heads, _, head_dim = blocks.shape
    return jnp.swapaxes(blocks, 1, 2).reshape(num_tokens, num_kv_heads, -1, head_dim)
