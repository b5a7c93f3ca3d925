"""Reference body of `kv_scatter`: one token after another; a select skips padding."""

import jax
import jax.numpy as jnp
from jax import lax


def kv_scatter_reference(
    kv_cache: jax.Array,  # [num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None,  # like k; None if num_parts is 1
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
) -> jax.Array:
    """See `api.kv_scatter`."""
    if not slots.size:  # the loop's body is traced even if it never runs
        return kv_cache
    parts = (k,) if v is None else (k, v)
    num_blocks, block_size = kv_cache.shape[1] // len(parts), kv_cache.shape[3]

    def write_token(token_idx: jax.Array, kv_cache: jax.Array) -> jax.Array:
        slot = slots[token_idx]
        is_real = (slot >= 0) & (slot < num_blocks * block_size)
        readable_slot = jnp.where(is_real, slot, 0)
        block, offset = readable_slot // block_size, readable_slot % block_size
        for part_idx, part in enumerate(parts):
            where = (row, len(parts) * block + part_idx, slice(None), offset)
            # A padding token writes back what slot 0 already holds.
            new = jnp.where(is_real, part[token_idx], kv_cache[where])
            kv_cache = kv_cache.at[where].set(new)
        return kv_cache

    return lax.fori_loop(0, slots.shape[0], write_token, kv_cache)
