"""Leading blocks that many decode requests hold: read once for all of them, by dense products."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_prefill import add_kv_tile
from pallas_kernels.paged_attention.xla_problem import AttentionProblem, RunningSoftmax, rows_at

# With fewer rows, looking for a prefix costs more than it saves (docs/design/cpu.md).
MIN_ROWS = 8
# A block is multiplied with the query tokens of all rows if at least one row in ROWS_PER_HOLDER
# holds it. KV_TILE_TOKENS is the number of keys in one product.
ROWS_PER_HOLDER = 4
KV_TILE_TOKENS = 256


class SharedPrefix(NamedTuple):
    """The first `num_blocks` blocks of the requests in `is_member`, the same ones for all."""

    num_blocks: jax.Array  # i32[], 0 where sharing is not worth it
    is_member: jax.Array  # bool[num_reqs]
    block_ids: jax.Array  # i32[max_blocks_per_req], anything from num_blocks on


def find_shared_prefix(
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    num_full: jax.Array,  # i32[num_reqs], number of leading blocks of which all keys are seen
) -> SharedPrefix:
    """Finds the first block that most requests share, and the blocks that they share after it.

    Blocks are compared by their place in memory, so the reason for sharing does not matter: the
    prefix cache, beams, or samples of one prompt. Other requests and further prefixes are ignored,
    even if many requests share them.

    Example: tables [[7, 3, 4], [5, 6, 0], [7, 3, 8], [7, 3, 9]], all blocks full -> 2 blocks, of
    requests 0, 2 and 3.
    """
    num_reqs, max_blocks_per_req = block_tables.shape
    req_idx = jnp.arange(num_reqs, dtype=jnp.int32)
    first = jnp.where(num_full > 0, block_tables[:, 0], -1 - req_idx)
    votes = (first[:, None] == first[None, :]).sum(axis=1, dtype=jnp.int32)
    # The request with the most blocks among those with the most votes. Plain reductions find it,
    # because they compile faster.
    leader = jnp.where(votes == votes.max(), num_full * num_reqs + req_idx, 0).max()
    leader = lax.rem(leader, num_reqs)
    column = jnp.arange(max_blocks_per_req, dtype=jnp.int32)
    block_ids = rows_at(block_tables, leader)
    is_same = block_tables == block_ids
    # i32[num_reqs], the number of leading blocks that are the same as the leader's.
    num_same = jnp.where(is_same, max_blocks_per_req, column).min(axis=1)
    num_same = jnp.minimum(num_same, jnp.minimum(num_full, rows_at(num_full, leader)))
    num_holders = (num_same[:, None] > column).sum(axis=0, dtype=jnp.int32)
    wanted = max(2, -(-num_reqs // ROWS_PER_HOLDER))
    num_blocks = (num_holders >= wanted).sum(dtype=jnp.int32)  # the number of holders never grows
    is_member = (num_same >= num_blocks) & (num_blocks > 0)
    return SharedPrefix(num_blocks, is_member, block_ids)


def attend_shared_prefix(
    problem: AttentionProblem,
    prefix: SharedPrefix,
    q: jax.Array,  # f[num_reqs, num_kv_heads, group_size, head_dim]
    factors: jax.Array | None,  # f32[num_reqs, num_kv_heads, group_size, num_profiles]
) -> RunningSoftmax:  # f32[num_reqs, num_kv_heads, group_size]
    """The softmax of every member over the shared blocks. For others, it has seen no key."""
    num_reqs, num_kv_heads, group_size, head_dim = q.shape
    (max_blocks_per_req,) = prefix.block_ids.shape
    block_size = problem.block_size
    tile_blocks = min(max(1, KV_TILE_TOKENS // block_size), max_blocks_per_req)
    # The query heads of a KV head are rows of one product.
    rows = q.transpose(1, 2, 0, 3).reshape(num_kv_heads, group_size * num_reqs, head_dim)

    def add_tile(tile_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        logical_block = tile_idx * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
        is_shared = logical_block < prefix.num_blocks
        block_ids = rows_at(prefix.block_ids, jnp.minimum(logical_block, max_blocks_per_req - 1))
        k, v = problem.gather_blocks(block_ids, is_shared)
        is_key = jnp.repeat(is_shared, block_size)  # bool[kv_tile]
        is_seen = is_key & prefix.is_member[:, None]  # bool[num_reqs, kv_tile]
        key_position = tile_idx * is_key.shape[0] + jnp.arange(is_key.shape[0], dtype=jnp.int32)
        distance = key_position - (problem.seq_lens - 1)[:, None]  # i32[num_reqs, kv_tile]
        return add_kv_tile(problem, softmax, rows, factors, k, v, is_key, is_seen, distance)

    num_tiles = lax.div(prefix.num_blocks + tile_blocks - 1, tile_blocks)
    empty = problem.empty_softmax((), (num_reqs,))
    softmax = lax.fori_loop(0, num_tiles, add_tile, empty)
    return RunningSoftmax(*(jnp.moveaxis(array, 2, 0) for array in softmax))
