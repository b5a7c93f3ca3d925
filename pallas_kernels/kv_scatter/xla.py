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
    # A row past the end drops the token, whatever its block. Row and block are two indices of one
    # scatter: with the two axes merged, XLA on the CPU copies a cache of one KV head, since back in
    # five axes it has another layout. Slicing the row out is a copy too.
    row_idx = jnp.where(is_real, row, num_rows)
    # Unsigned, since division of numbers with a sign is two kernels more to compile.
    place = slots.astype(jnp.uint32)
    block, offset = ((x.astype(jnp.int32)) for x in (place // block_size, place % block_size))
    if slots.shape[0] == 1:
        # XLA on the CPU turns a scatter of one index into a select between the old cache and a
        # new one, a copy of all of it; a second index that is dropped keeps it a scatter.
        row_idx = jnp.append(row_idx, num_rows)
        block, offset, k, v = (jnp.concatenate([x, x]) for x in (block, offset, k, v))
    return (
        _scatter(k_cache, row_idx, block, offset, k),
        _scatter(v_cache, row_idx, block, offset, v),
    )


def _scatter(
    cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    row_idx: jax.Array,  # i32[num_tokens], in [0, num_rows) or past it
    block: jax.Array,  # i32[num_tokens]
    offset: jax.Array,  # i32[num_tokens], in [0, block_size)
    new: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
) -> jax.Array:
    where = cache.at[row_idx, block, :, offset]
    return where.set(new, mode="drop", wrap_negative_indices=False)
