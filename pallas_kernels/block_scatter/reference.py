"""Reference body of `block_scatter`: one block after the other, padding left out by a select."""

import jax
import jax.numpy as jnp
from jax import lax


def block_scatter_reference(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, head_dim]
    v_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_scatter`."""
    if not block_ids.size:  # the loop is traced, even for no turn
        return k_cache, v_cache
    num_blocks = k_cache.shape[1]

    def write_one(
        idx: jax.Array, caches: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        k_cache, v_cache = caches
        is_real = (block_ids[idx] >= 0) & (block_ids[idx] < num_blocks)
        # Padding writes back what block 0 already holds.
        block_id = jnp.where(is_real, block_ids[idx], 0)
        new_k = jnp.where(is_real, k_blocks[:, idx], k_cache[:, block_id])
        new_v = jnp.where(is_real, v_blocks[:, idx], v_cache[:, block_id])
        return k_cache.at[:, block_id].set(new_k), v_cache.at[:, block_id].set(new_v)

    return lax.fori_loop(0, block_ids.shape[0], write_one, (k_cache, v_cache))
