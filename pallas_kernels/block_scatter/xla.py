"""Fast plain-JAX body of `block_scatter`: one scatter a cache, in place when donated."""

import jax
import jax.numpy as jnp


def block_scatter_xla(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, head_dim]
    v_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_scatter`."""
    num_rows, num_blocks = k_cache.shape[:2]
    # Past the end of the whole cache before a row is added: past the end of one row is the next.
    past_the_end = num_rows * num_blocks
    is_real = (block_ids >= 0) & (block_ids < num_blocks)
    first_block = jnp.arange(num_rows, dtype=jnp.int32)[:, None] * num_blocks
    flat_ids = jnp.where(is_real, first_block + block_ids, past_the_end).reshape(-1)
    if flat_ids.shape[0] == 1:
        # As in `kv_scatter`: a second index, dropped, keeps XLA:CPU from copying the cache.
        flat_ids = jnp.append(flat_ids, past_the_end)
        k_blocks, v_blocks = (jnp.concatenate([x, x]) for x in (k_blocks, v_blocks))
    return _scatter(k_cache, k_blocks, flat_ids), _scatter(v_cache, v_blocks, flat_ids)


def _scatter(
    cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    blocks: jax.Array,  # num_rows * num_ids blocks in its leading axes
    flat_ids: jax.Array,  # i32[num_rows * num_ids], in [0, num_rows * num_blocks) or past it
) -> jax.Array:
    # Row and block as two indices of one scatter, as in `kv_scatter`: with the two axes merged, XLA
    # on the CPU copies a cache of one KV head.
    num_blocks, block_dims = cache.shape[1], cache.shape[2:]
    flat_blocks = blocks.reshape(flat_ids.shape[0], *block_dims)
    return cache.at[flat_ids // num_blocks, flat_ids % num_blocks].set(flat_blocks, mode="drop")
