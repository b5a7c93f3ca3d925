"""Plain-JAX body of `sparse_paged_attention`.

All tokens are computed alike, in tiles of rows. A row gathers the keys and values of its own
positions, in their order, and attends to one tile of them after the other. Temporary memory: the
output in float32, and tiles of 32 rows and 256 keys and values.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import (
    MASKED_LOGIT,
    RunningSoftmax,
    product_f32,
    rows_at,
)
from pallas_kernels.query_tiles import QueryRows, map_tiles, padded, tile_rows
from pallas_kernels.stored_dtype import as_values

# Keys that a row reads at a time. A guess.
_KEY_TILE = 256


def sparse_paged_attention_xla(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, num_positions]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
) -> jax.Array:  # f[num_tokens, num_q_heads, head_dim]
    """See `api.sparse_paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    tile = tile_rows(num_tokens, batch_invariant=batch_invariant)
    grouped = q.reshape(num_tokens, num_kv_heads, -1, head_dim)
    grouped = padded(grouped, tile)
    key_tile = min(_KEY_TILE, positions.shape[1])
    missing = -positions.shape[1] % key_tile
    positions = jnp.pad(
        padded(positions, tile), ((0, 0), (0, missing)), constant_values=jnp.iinfo(jnp.int32).max
    )
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)

    def attend(rows: QueryRows) -> jax.Array:
        own_q, tables = rows.of(grouped), block_tables[rows.req_idx]
        seq_len = jnp.where(rows.is_used, seq_lens[rows.req_idx], 0)
        chosen = rows.of(positions)
        is_chosen = chosen < seq_len[:, None]  # bool[tile, num_positions]

        def add_keys(tile_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
            start = tile_idx * key_tile
            is_seen = lax.dynamic_slice_in_dim(is_chosen, start, key_tile, axis=1)
            position = lax.dynamic_slice_in_dim(chosen, start, key_tile, axis=1)
            position = jnp.where(is_seen, position, 0)
            blocks = jnp.take_along_axis(tables, position // block_size, axis=1)
            # The table of a row that sees nothing may hold anything.
            blocks = jnp.where(is_seen, blocks, 0)[:, :, None]
            offset = (position % block_size)[:, :, None]

            def read(part: int) -> jax.Array:  # f[tile, key_tile, num_kv_heads, head_dim]
                stored = rows_at(kv_cache, row, 2 * blocks + part, heads, offset)
                # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
                return jnp.where(is_seen[:, :, None, None], as_values(stored, kv_dtype), 0)

            return _add_keys(softmax, own_q, read(0), read(1), is_seen, scale)

        shape = own_q.shape[:3]
        empty = RunningSoftmax(
            jnp.full(shape, MASKED_LOGIT, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        places = jnp.arange(1, is_chosen.shape[1] + 1, dtype=jnp.int32)
        last_place = jnp.where(is_chosen, places, 0).max()
        num_tiles = (last_place + key_tile - 1) // key_tile
        out = lax.fori_loop(0, num_tiles, add_keys, empty).result()[0]
        return out.reshape(tile, num_q_heads, head_dim)

    out = jnp.zeros(q.shape, jnp.float32)
    return map_tiles(attend, out, seq_lens, query_start_loc, tile=tile).astype(q.dtype)


def _add_keys(
    softmax: RunningSoftmax,  # f32[tile, num_kv_heads, group_size]
    q: jax.Array,  # f[tile, num_kv_heads, group_size, head_dim]
    k: jax.Array,  # f[tile, key_tile, num_kv_heads, head_dim]
    v: jax.Array,  # f[tile, key_tile, num_kv_heads, head_dim]
    is_seen: jax.Array,  # bool[tile, key_tile]
    scale: float,
) -> RunningSoftmax:
    is_seen = is_seen[:, None, None, :]
    logits = jnp.where(is_seen, product_f32("thgd,tkhd->thgk", q, k) * scale, MASKED_LOGIT)
    # In the wider of the dtypes of q and of the cache: see `AttentionProblem.as_weights`.
    dtype = jnp.promote_types(q.dtype, v.dtype)
    return softmax.add(
        logits,
        is_seen,
        lambda weights: product_f32("thgk,tkhd->thgd", weights.astype(dtype), v),
    )
