"""Reference body of `block_copy`: one copy after another, all of them from the old pages."""

import jax
import jax.numpy as jnp
from jax import lax


def block_copy_reference(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
) -> jax.Array:
    """See `api.block_copy`."""
    if not source_block_ids.size:  # the loop's body is traced even if it never runs
        return pages
    num_blocks = pages.shape[1]

    def copy_one(copy_idx: jax.Array, new_pages: jax.Array) -> jax.Array:
        source, target = source_block_ids[copy_idx], target_block_ids[copy_idx]
        is_real = (target >= 0) & (target < num_blocks)
        # Padding writes back what block 0 already holds.
        target = jnp.where(is_real, target, 0)
        source = jnp.where(is_real, source, 0)
        copied = jnp.where(is_real, pages[:, source], new_pages[:, target])
        return new_pages.at[:, target].set(copied)

    return lax.fori_loop(0, source_block_ids.shape[0], copy_one, pages)
