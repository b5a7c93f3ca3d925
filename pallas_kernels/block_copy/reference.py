"""Reference body of `block_copy`: one copy after the other, all of them out of the old cache."""

import jax
import jax.numpy as jnp
from jax import lax


def block_copy_reference(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_copy`."""
    if not source_block_ids.size:  # the loop is traced, even for no turn
        return k_cache, v_cache
    num_blocks = k_cache.shape[1]

    def copy_one(
        copy_idx: jax.Array, caches: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        source, target = source_block_ids[copy_idx], target_block_ids[copy_idx]
        is_real = (target >= 0) & (target < num_blocks)
        # Padding writes back what block 0 already holds.
        readable_target = jnp.where(is_real, target, 0)
        readable_source = jnp.where(is_real, source, 0)
        new_k, new_v = (
            jnp.where(is_real, old[:, readable_source], new[:, readable_target])
            for old, new in zip((k_cache, v_cache), caches, strict=True)
        )
        return (
            caches[0].at[:, readable_target].set(new_k),
            caches[1].at[:, readable_target].set(new_v),
        )

    return lax.fori_loop(0, source_block_ids.shape[0], copy_one, (k_cache, v_cache))
