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
    # Past the end of the whole cache before a row is added: past the end of one row is the next.
    past_the_end = num_rows * num_blocks
    is_real = (target_block_ids >= 0) & (target_block_ids < num_blocks)
    sources = jnp.where(is_real, source_block_ids, 0)

    def copy_row(
        row: jax.Array, flat_caches: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        first_block = row * num_blocks
        targets = jnp.where(is_real, first_block + target_block_ids, past_the_end)
        # Row by row: the buffer between reading and writing is one row's, not the whole model's.
        flat_k, flat_v = flat_caches
        return (
            flat_k.at[targets].set(flat_k[first_block + sources], mode="drop"),
            flat_v.at[targets].set(flat_v[first_block + sources], mode="drop"),
        )

    flat_caches = tuple(cache.reshape(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    flat_k, flat_v = lax.fori_loop(0, num_rows, copy_row, flat_caches)
    return flat_k.reshape(k_cache.shape), flat_v.reshape(v_cache.shape)
