"""Attention of each token to positions of its own choice, for bodies in plain XLA.

All tokens are computed alike, in tiles of rows. A row gathers the keys of its positions, in their
order, and attends to one tile of them after the other. Temporary memory: the output in float32, and
tiles of 32 rows and 256 keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import MASKED_LOGIT, RunningSoftmax
from pallas_kernels.query_tiles import QueryRows, map_tiles, padded, tile_rows

# Keys that a row reads at a time. A guess.
_KEY_TILE = 256


class ChosenKeys(NamedTuple):
    """Places in the cache of some of the positions that each row of a tile has chosen.

    Where `is_seen` is false, the place is 0. The memory there may hold NaN, and a weight of 0 times
    NaN is NaN. So `add_keys` must replace the numbers that it reads there.
    """

    is_seen: jax.Array  # bool[tile, key_tile]
    block_ids: jax.Array  # i32[tile, key_tile]
    offsets: jax.Array  # i32[tile, key_tile], in the block


def attend_to_positions(
    add_keys: Callable[[RunningSoftmax, jax.Array, ChosenKeys], RunningSoftmax],
    q: jax.Array,  # f[num_tokens, *heads, query_dim]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, num_positions]
    *,
    block_size: int,
    value_dim: int,
    batch_invariant: bool,
) -> jax.Array:  # f32[num_tokens, *heads, value_dim]
    """Computes attention of each token to its chosen positions, except those past its sequence.

    Args:
        add_keys: Adds keys to the softmax f32[tile, *heads] of queries f[tile, *heads, query_dim].
    """
    num_tokens, *heads, _ = q.shape
    tile = tile_rows(num_tokens, batch_invariant=batch_invariant)
    q = padded(q, tile)
    key_tile = min(_KEY_TILE, positions.shape[1])
    positions = jnp.pad(
        padded(positions, tile),
        ((0, 0), (0, -positions.shape[1] % key_tile)),
        constant_values=jnp.iinfo(jnp.int32).max,
    )

    def attend(rows: QueryRows) -> jax.Array:
        own_q, tables, chosen = rows.of(q), block_tables[rows.req_idx], rows.of(positions)
        seq_len = jnp.where(rows.is_used, seq_lens[rows.req_idx], 0)
        is_chosen = chosen < seq_len[:, None]  # bool[tile, num_positions]

        def add_tile(tile_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
            start = tile_idx * key_tile
            is_seen = lax.dynamic_slice_in_dim(is_chosen, start, key_tile, axis=1)
            position = lax.dynamic_slice_in_dim(chosen, start, key_tile, axis=1)
            position = jnp.where(is_seen, position, 0)
            block_ids = jnp.take_along_axis(tables, position // block_size, axis=1)
            # The table of a row that sees nothing may hold anything.
            block_ids = jnp.where(is_seen, block_ids, 0)
            return add_keys(softmax, own_q, ChosenKeys(is_seen, block_ids, position % block_size))

        softmax = RunningSoftmax(
            jnp.full(own_q.shape[:-1], MASKED_LOGIT, jnp.float32),
            jnp.zeros(own_q.shape[:-1], jnp.float32),
            jnp.zeros((*own_q.shape[:-1], value_dim), jnp.float32),
        )
        places = jnp.arange(1, is_chosen.shape[1] + 1, dtype=jnp.int32)
        last_place = jnp.where(is_chosen, places, 0).max()
        num_tiles = (last_place + key_tile - 1) // key_tile
        return lax.fori_loop(0, num_tiles, add_tile, softmax).result()[0]

    out = jnp.zeros((num_tokens, *heads, value_dim), jnp.float32)
    return map_tiles(attend, out, seq_lens, query_start_loc, tile=tile)
