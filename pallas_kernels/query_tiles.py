"""Query tokens in tiles of rows that are computed alike, for bodies in plain XLA.

Rounding depends on the shape of products. With tiles of one size, the bits of a token do not depend
on the other tokens of the batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Rows of a tile. A guess.
QUERY_TILE = 32


class QueryRows(NamedTuple):
    """The tokens of a tile, in the order of the batch. The rows after the last one are padding."""

    start: jax.Array  # i32[], index of the first token in the batch
    req_idx: jax.Array  # i32[tile], in [0, num_reqs), of padding too
    position: jax.Array  # i32[tile], of the token in its sequence
    is_used: jax.Array  # bool[tile], False for padding and for tokens of empty sequences

    def of(self, x: jax.Array) -> jax.Array:  # [num_tokens, ...] -> [tile, ...]
        """The rows of an array that has whole tiles."""
        return lax.dynamic_slice_in_dim(x, self.start, self.req_idx.shape[0])


def tile_rows(num_tokens: int, *, batch_invariant: bool) -> int:
    """Rows of a tile: fewer in a small batch, unless bits must not depend on the batch."""
    return QUERY_TILE if batch_invariant else min(QUERY_TILE, num_tokens)


def map_tiles(
    compute: Callable[[QueryRows], jax.Array],
    out: jax.Array,  # [num_tokens, ...], what rows of padding have
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    tile: int,
) -> jax.Array:  # [num_tokens, ...]
    """Computes the rows of `out` in one tile after the other. Tiles of padding alone are skipped.

    Args:
        compute: Returns the rows of a tile, [tile, ...]. Arrays of which it takes rows must have
            whole tiles (`padded`).
    """
    num_tokens = out.shape[0]

    def compute_tile(tile_idx: jax.Array, out: jax.Array) -> jax.Array:
        rows = _rows_at(tile_idx * tile, tile, seq_lens, query_start_loc)
        is_used = rows.is_used.reshape(-1, *[1] * (out.ndim - 1))
        own = jnp.where(is_used, compute(rows), rows.of(out))
        return lax.dynamic_update_slice_in_dim(out, own, rows.start, 0)

    num_tiles = (query_start_loc[-1] + tile - 1) // tile
    return lax.fori_loop(0, num_tiles, compute_tile, padded(out, tile))[:num_tokens]


def padded(x: jax.Array, tile: int) -> jax.Array:
    """The array with zeros appended, so that it has whole tiles of rows."""
    return jnp.pad(x, ((0, -x.shape[0] % tile), *[(0, 0)] * (x.ndim - 1)))


def _rows_at(
    start: jax.Array, tile: int, seq_lens: jax.Array, query_start_loc: jax.Array
) -> QueryRows:
    token_idx = start + jnp.arange(tile, dtype=jnp.int32)
    # query_start_loc [0, 2, 2, 5] -> request of each token [0, 0, 2, 2, 2], then 3 (padding).
    req_idx = (query_start_loc[1:] <= token_idx[:, None]).sum(axis=1, dtype=jnp.int32)
    req_idx = jnp.minimum(req_idx, seq_lens.shape[0] - 1)
    seq_len = seq_lens[req_idx]
    return QueryRows(
        start=start,
        req_idx=req_idx,
        position=seq_len - (query_start_loc[req_idx + 1] - token_idx),
        is_used=(token_idx < query_start_loc[-1]) & (seq_len > 0),
    )
