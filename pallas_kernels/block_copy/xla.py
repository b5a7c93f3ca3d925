"""Fast plain-JAX body of `block_copy`: a gather and a scatter for each row, in place."""

import jax
import jax.numpy as jnp
from jax import lax


def block_copy_xla(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_copy`."""
    num_rows, num_blocks = k_cache.shape[:2]
    is_real = (target_block_ids >= 0) & (target_block_ids < num_blocks)
    sources = jnp.where(is_real, source_block_ids, 0)
    targets = jnp.where(is_real, target_block_ids, num_blocks)  # past the end: dropped

    def copy_row(
        row: jax.Array, caches: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        # Row by row: the buffer between reading and writing is one row's, not the whole model's.
        # Row and block are two indices; with the axes merged, XLA on the CPU copies a cache of one
        # KV head, which has another layout when the axes are parted again.
        k_cache, v_cache = caches
        return (
            k_cache.at[row, targets].set(k_cache[row, sources], mode="drop"),
            v_cache.at[row, targets].set(v_cache[row, sources], mode="drop"),
        )

    return lax.fori_loop(0, num_rows, copy_row, (k_cache, v_cache))
