"""Plain-JAX body of `index_top_k`.

All tokens are computed alike, in tiles of rows. A row reads its own keys, in the order of their
positions, and keeps the best tokens so far. Temporary memory: tiles of 32 rows and of 512 keys, or
of `top_k` keys if that is more. If `key_step` divides the block size, only keys are multiplied.
Otherwise all vectors of a block are multiplied, and vectors that are no keys are masked.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import product_f32, rows_at
from pallas_kernels.query_tiles import QueryRows, map_tiles, padded, tile_rows
from pallas_kernels.stored_dtype import as_values

# Keys that a row reads at a time, at least. A guess.
_MIN_KEY_TILE = 512


def index_top_k_xla(
    q: jax.Array,  # f[num_tokens, num_heads, key_dim]
    weights: jax.Array,  # f32[num_tokens, num_heads]
    key_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    top_k: int,
    key_step: int,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
    no_position: int,
) -> jax.Array:  # i32[num_tokens, top_k]
    """See `api.index_top_k`."""
    num_tokens, num_heads, key_dim = q.shape
    block_size, max_blocks = key_cache.shape[3], block_tables.shape[1]
    # Without the axis of size 1, as in `sparse_latent_attention`.
    stored = key_cache.reshape(*key_cache.shape[:2], *key_cache.shape[3:])
    tile = tile_rows(num_tokens, batch_invariant=batch_invariant)
    q, weights = padded(q, tile), padded(weights, tile)
    step = key_step if block_size % key_step == 0 else 1
    tile_blocks = min(-(-max(top_k, _MIN_KEY_TILE) * step // block_size), max_blocks)
    key_tile = tile_blocks * block_size // step

    def choose(rows: QueryRows) -> jax.Array:
        own_q, own_weights, tables = rows.of(q), rows.of(weights), block_tables[rows.req_idx]
        last = jnp.where(rows.is_used, rows.position, -1)

        def add_keys(
            tile_idx: jax.Array, best: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            logical = tile_idx * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
            has_seen = logical * block_size <= last[:, None]  # bool[tile, tile_blocks]
            # The last tile may reach past the table's end. Nothing is seen there.
            block_ids = tables[:, jnp.minimum(logical, max_blocks - 1)]
            # Row and block are two indices of one gather (`AttentionProblem.gather_blocks`).
            blocks = rows_at(stored, row, jnp.where(has_seen, block_ids, 0))
            blocks = blocks[:, :, step - 1 :: step]
            keys = as_values(blocks, kv_dtype).reshape(tile, key_tile, -1)[..., :key_dim]
            products = product_f32("thd,tkd->thk", own_q, keys)
            scores = product_f32("th,thk->tk", own_weights, jnp.maximum(products, 0))
            key_idx = tile_idx * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
            position = key_idx * step + step - 1
            is_seen = (position <= last[:, None]) & (position % key_step == key_step - 1)
            # Zeros are equal whatever their signs. Unwritten memory may hold NaN.
            scores = jnp.where(is_seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
            positions = jnp.where(is_seen, position, no_position)
            return _best(best, (scores, positions), top_k)

        shape = (tile, top_k)
        none = (jnp.full(shape, -jnp.inf), jnp.full(shape, no_position, jnp.int32))
        num_tiles = last.max() // (tile_blocks * block_size) + 1
        return lax.fori_loop(0, num_tiles, add_keys, none)[1]

    out = jnp.full((num_tokens, top_k), no_position, jnp.int32)
    return map_tiles(choose, out, seq_lens, query_start_loc, tile=tile)


def _best(
    earlier: tuple[jax.Array, jax.Array],  # scores f32[tile, n], and positions i32[tile, n]
    later: tuple[jax.Array, jax.Array],
    top_k: int,
) -> tuple[jax.Array, jax.Array]:
    """The largest scores and their positions. Of equal scores, one of `earlier` comes first."""
    scores, positions = (jnp.concatenate(pair, axis=1) for pair in zip(earlier, later, strict=True))
    scores, places = lax.top_k(scores, top_k)
    return scores, jnp.take_along_axis(positions, places, axis=1)
