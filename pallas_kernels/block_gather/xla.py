"""Fast plain-JAX body of `block_gather`: one gather."""

import jax
import jax.numpy as jnp


def block_gather_xla(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    block_ids: jax.Array,  # i32[num_ids]
) -> jax.Array:  # [num_rows, num_ids, ...]
    """See `api.block_gather`."""
    # `mode="fill"` fills for indices past the end, but counts negative ones from the end.
    readable_ids = jnp.where(block_ids >= 0, block_ids, pages.shape[1])
    return jnp.take(pages, readable_ids, axis=1, mode="fill", fill_value=0)
