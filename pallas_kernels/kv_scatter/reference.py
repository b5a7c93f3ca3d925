"""Reference body of `kv_scatter`: one token after the other, padding left out by a select."""

import jax
import jax.numpy as jnp
from jax import lax


def kv_scatter_reference(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # likewise, [num_tokens, num_kv_heads, v_head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_scatter`."""
    if not slots.size:  # the loop is traced, even for no turn
        return k_cache, v_cache
    _, num_blocks, _, block_size, _ = k_cache.shape

    def write_token(
        token_idx: jax.Array, caches: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        k_cache, v_cache = caches
        slot = slots[token_idx]
        is_real = (slot >= 0) & (slot < num_blocks * block_size)
        readable_slot = jnp.where(is_real, slot, 0)
        where = (row, readable_slot // block_size, slice(None), readable_slot % block_size)
        # A padding token writes back what slot 0 already holds.
        new_k = jnp.where(is_real, k[token_idx], k_cache[where])
        new_v = jnp.where(is_real, v[token_idx], v_cache[where])
        return k_cache.at[where].set(new_k), v_cache.at[where].set(new_v)

    return lax.fori_loop(0, slots.shape[0], write_token, (k_cache, v_cache))
