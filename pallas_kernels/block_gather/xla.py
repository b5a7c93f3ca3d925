"""Fast plain-JAX body of `block_gather`: one gather a cache."""

import jax
import jax.numpy as jnp


def block_gather_xla(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_gather`."""
    # `mode="fill"` fills past the end, but takes a negative index from the end.
    readable_ids = jnp.where(block_ids >= 0, block_ids, k_cache.shape[1])
    return (
        jnp.take(k_cache, readable_ids, axis=1, mode="fill", fill_value=0),
        jnp.take(v_cache, readable_ids, axis=1, mode="fill", fill_value=0),
    )
