"""Plain-JAX body of `sparse_latent_attention`.

All tokens are computed alike, in tiles of rows. A row gathers the vectors of its own positions, in
their order, and attends to one tile of them after the other. Temporary memory: the output in
float32, and tiles of 32 rows and 256 vectors.
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

# Vectors that a row reads at a time. A guess.
_KEY_TILE = 256


def sparse_latent_attention_xla(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, top_k]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
) -> jax.Array:  # f[num_tokens, num_q_heads, latent_dim]
    """See `api.sparse_latent_attention`."""
    num_tokens, num_heads, latent_dim = q_latent.shape
    block_size, top_k = kv_cache.shape[3], positions.shape[1]
    # Without the axis of size 1, for which XLA on the CPU chooses another layout. A program that
    # last wrote through another view of the pages would then copy the whole cache.
    stored = kv_cache.reshape(*kv_cache.shape[:2], *kv_cache.shape[3:])
    tile = tile_rows(num_tokens, batch_invariant=batch_invariant)
    q = padded(jnp.concatenate([q_latent, q_rope], axis=-1), tile)
    key_tile = min(_KEY_TILE, top_k)
    missing = -top_k % key_tile
    positions = jnp.pad(
        padded(positions, tile), ((0, 0), (0, missing)), constant_values=jnp.iinfo(jnp.int32).max
    )

    def attend(rows: QueryRows) -> jax.Array:
        own_q, tables = rows.of(q), block_tables[rows.req_idx]
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
            places = (row, jnp.where(is_seen, blocks, 0), position % block_size)
            vectors = as_values(rows_at(stored, *places), kv_dtype)[..., : own_q.shape[-1]]
            # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
            vectors = jnp.where(is_seen[:, :, None], vectors, 0)
            return _add_vectors(softmax, own_q, vectors, is_seen, latent_dim, scale)

        heads = (tile, num_heads)
        empty = RunningSoftmax(
            jnp.full(heads, MASKED_LOGIT, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            jnp.zeros((*heads, latent_dim), jnp.float32),
        )
        num_chosen = is_chosen.sum(axis=1).max()
        num_tiles = (num_chosen + key_tile - 1) // key_tile
        return lax.fori_loop(0, num_tiles, add_keys, empty).result()[0]

    out = jnp.zeros(q_latent.shape, jnp.float32)
    out = map_tiles(attend, out, seq_lens, query_start_loc, tile=tile)
    return out.astype(q_latent.dtype)


def _add_vectors(
    softmax: RunningSoftmax,  # f32[tile, num_q_heads]
    q: jax.Array,  # f[tile, num_q_heads, latent_dim + rope_dim]
    vectors: jax.Array,  # f[tile, key_tile, latent_dim + rope_dim]
    is_seen: jax.Array,  # bool[tile, key_tile]
    latent_dim: int,
    scale: float,
) -> RunningSoftmax:
    is_seen = is_seen[:, None, :]
    logits = jnp.where(is_seen, product_f32("thd,tkd->thk", q, vectors) * scale, MASKED_LOGIT)
    # In the wider of the dtypes of q and of the cache: see `AttentionProblem.as_weights`.
    dtype = jnp.promote_types(q.dtype, vectors.dtype)
    latents = vectors[..., :latent_dim]
    return softmax.add(
        logits,
        is_seen,
        lambda weights: product_f32("thk,tkd->thd", weights.astype(dtype), latents),
    )
