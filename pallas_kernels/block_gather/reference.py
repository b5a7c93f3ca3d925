"""Reference body of `block_gather`: one block after another."""

import jax
import jax.numpy as jnp
from jax import lax


def block_gather_reference(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    block_ids: jax.Array,  # i32[num_ids]
) -> jax.Array:  # [num_rows, num_ids, ...]
    """See `api.block_gather`."""
    num_blocks = pages.shape[1]

    def copy_one(block_id: jax.Array) -> jax.Array:
        is_real = (block_id >= 0) & (block_id < num_blocks)
        block = pages[:, jnp.where(is_real, block_id, 0)]
        return jnp.where(is_real, block, jnp.zeros_like(block))

    return jnp.moveaxis(lax.map(copy_one, block_ids), 0, 1)
