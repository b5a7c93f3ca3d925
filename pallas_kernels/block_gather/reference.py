"""Reference body of `block_gather`: one block after the other."""

import jax
import jax.numpy as jnp
from jax import lax


def block_gather_reference(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_gather`."""
    num_blocks = k_cache.shape[1]

    def take(cache: jax.Array) -> jax.Array:
        def take_one(block_id: jax.Array) -> jax.Array:
            is_real = (block_id >= 0) & (block_id < num_blocks)
            block = cache[:, jnp.where(is_real, block_id, 0)]
            return jnp.where(is_real, block, jnp.zeros_like(block))

        return jnp.moveaxis(lax.map(take_one, block_ids), 0, 1)

    return take(k_cache), take(v_cache)
