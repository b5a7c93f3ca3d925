"""Fast plain-JAX body of `block_copy`: a gather and a scatter for each row, in place."""

import jax
import jax.numpy as jnp
from jax import lax


def block_copy_xla(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
) -> jax.Array:
    """See `api.block_copy`."""
    num_rows, num_blocks = pages.shape[:2]
    is_real = (target_block_ids >= 0) & (target_block_ids < num_blocks)
    sources = jnp.where(is_real, source_block_ids, 0)
    targets = jnp.where(is_real, target_block_ids, num_blocks)  # past the end: dropped

    def copy_row(row: jax.Array, pages: jax.Array) -> jax.Array:
        # Row by row, so that the buffer between reading and writing holds one row, not the whole
        # cache. Row and block are two indices: with the axes merged, XLA on the CPU copies a cache
        # of one KV head, because its layout differs after the axes are split again.
        return pages.at[row, targets].set(pages[row, sources], mode="drop")

    return lax.fori_loop(0, num_rows, copy_row, pages)
