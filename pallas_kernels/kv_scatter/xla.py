"""Fast plain-JAX body of `kv_scatter`: one scatter for K and one for V, in place when donated."""

import jax
import jax.numpy as jnp


def kv_scatter_xla(
    kv_cache: jax.Array,  # [num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None,  # like k; None if num_parts is 1
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
) -> jax.Array:
    """See `api.kv_scatter`."""
    parts = (k,) if v is None else (k, v)
    num_rows, num_entries, _, block_size, _ = kv_cache.shape
    num_blocks = num_entries // len(parts)
    is_real = (slots >= 0) & (slots < num_blocks * block_size)
    # A padding token gets a row past the end, so its write is dropped. Row and block are two
    # indices of one scatter: with the axes merged, XLA on the CPU copies a cache of one KV head,
    # because its layout differs after the axes are split again. Slicing the row out is a copy too.
    row_idx = jnp.where(is_real, row, num_rows)
    # Unsigned, because signed division adds two kernels to compile.
    place = slots.astype(jnp.uint32)
    block, offset = ((x.astype(jnp.int32)) for x in (place // block_size, place % block_size))
    if slots.shape[0] == 1:
        # XLA on the CPU turns a scatter of one index into a select between the old cache and a new
        # one, which copies all of it. A second index, which is dropped, avoids this.
        row_idx = jnp.append(row_idx, num_rows)
        block, offset, *parts = (jnp.concatenate([x, x]) for x in (block, offset, *parts))
    for part_idx, part in enumerate(parts):
        where = kv_cache.at[row_idx, len(parts) * block + part_idx, :, offset]
        kv_cache = where.set(part, mode="drop", wrap_negative_indices=False)
    return kv_cache
