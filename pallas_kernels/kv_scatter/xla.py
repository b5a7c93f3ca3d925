"""Fast plain-JAX body of `kv_scatter`: one scatter a cache, in place when donated."""

import jax
import jax.numpy as jnp


def kv_scatter_xla(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # likewise, [num_tokens, num_kv_heads, v_head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_scatter`."""
    num_rows, num_blocks, _, block_size, _ = k_cache.shape
    is_real = (slots >= 0) & (slots < num_blocks * block_size)
    # Past the end of the whole cache before the row is added: `mode="drop"` drops an index past
    # the end, but takes a negative one from the end and would write the last block.
    past_the_end = num_rows * num_blocks
    flat_block = jnp.where(is_real, slots // block_size + row * num_blocks, past_the_end)
    offset = slots % block_size
    if slots.shape[0] == 1:
        # XLA on the CPU turns a scatter of one index into a select between the old cache and a
        # new one, a copy of all of it; a second index that is dropped keeps it a scatter.
        flat_block = jnp.append(flat_block, past_the_end)
        offset, k, v = (jnp.concatenate([x, x]) for x in (offset, k, v))
    return (
        _scatter(k_cache, flat_block, offset, k),
        _scatter(v_cache, flat_block, offset, v),
    )


def _scatter(
    cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    flat_block: jax.Array,  # i32[num_tokens], in [0, num_rows * num_blocks) or past it
    offset: jax.Array,  # i32[num_tokens], in [0, block_size)
    new: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
) -> jax.Array:
    # Row and block as two indices of one scatter. With the two axes merged, XLA on the CPU copies a
    # cache of one KV head: back in five axes it has another layout. Slicing the row is a copy too.
    num_blocks = cache.shape[1]
    where = (flat_block // num_blocks, flat_block % num_blocks, slice(None), offset)
    return cache.at[where].set(new, mode="drop")
