"""Reference body of `block_scatter`: one block after another; a select skips padding."""

import jax
import jax.numpy as jnp
from jax import lax


def block_scatter_reference(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    values: jax.Array,  # [num_rows, num_ids, ...]
    block_ids: jax.Array,  # i32[num_ids]
) -> jax.Array:
    """See `api.block_scatter`."""
    if not block_ids.size:  # the loop's body is traced even if it never runs
        return pages
    num_blocks = pages.shape[1]

    def write_one(idx: jax.Array, pages: jax.Array) -> jax.Array:
        is_real = (block_ids[idx] >= 0) & (block_ids[idx] < num_blocks)
        # Padding writes back what block 0 already holds.
        block_id = jnp.where(is_real, block_ids[idx], 0)
        new = jnp.where(is_real, values[:, idx], pages[:, block_id])
        return pages.at[:, block_id].set(new)

    return lax.fori_loop(0, block_ids.shape[0], write_one, pages)
