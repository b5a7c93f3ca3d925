"""Fast plain-JAX body of `block_scatter`: one scatter, in place when donated."""

import jax
import jax.numpy as jnp


def block_scatter_xla(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    values: jax.Array,  # [num_rows, num_ids, ...]
    block_ids: jax.Array,  # i32[num_ids]
) -> jax.Array:
    """See `api.block_scatter`."""
    num_rows, num_blocks = pages.shape[:2]
    # Padding is past the end of all rows: a block past the end of one row is in the next row.
    past_the_end = num_rows * num_blocks
    is_real = (block_ids >= 0) & (block_ids < num_blocks)
    first_block = jnp.arange(num_rows, dtype=jnp.int32)[:, None] * num_blocks
    flat_ids = jnp.where(is_real, first_block + block_ids, past_the_end).reshape(-1)
    values = values.reshape(flat_ids.shape[0], *pages.shape[2:])
    if flat_ids.shape[0] == 1:
        # As in `kv_scatter`, a second, dropped index keeps XLA:CPU from copying the cache.
        flat_ids = jnp.append(flat_ids, past_the_end)
        values = jnp.concatenate([values, values])
    # Row and block are two indices of one scatter, as in `kv_scatter`: with the two axes merged,
    # XLA on the CPU copies a cache of one KV head.
    where = pages.at[flat_ids // num_blocks, flat_ids % num_blocks]
    return where.set(values, mode="drop")
