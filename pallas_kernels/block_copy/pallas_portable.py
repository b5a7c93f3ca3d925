"""Simple Pallas body of `block_copy`, one grid step a row. Runs in interpret mode only."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def _row_kernel(
    source_block_ids_ref: jax.Array,  # i32[num_copies]
    target_block_ids_ref: jax.Array,  # i32[num_copies]
    _k_cache_ref: jax.Array,  # the same memory as k_out_ref
    _v_cache_ref: jax.Array,  # the same memory as v_out_ref
    k_out_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_out_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k_read_ref: jax.Array,  # f[num_copies, num_kv_heads, block_size, head_dim]
    v_read_ref: jax.Array,  # f[num_copies, num_kv_heads, block_size, v_head_dim]
) -> None:
    num_copies, num_blocks = k_read_ref.shape[0], k_out_ref.shape[1]
    row = pl.program_id(0)

    def read(copy_idx: jax.Array, _: None) -> None:
        source = jnp.clip(source_block_ids_ref[copy_idx], 0, num_blocks - 1)
        k_read_ref[copy_idx] = k_out_ref[row, source]
        v_read_ref[copy_idx] = v_out_ref[row, source]

    def write(copy_idx: jax.Array, _: None) -> None:
        target = target_block_ids_ref[copy_idx]

        @pl.when((target >= 0) & (target < num_blocks))
        def _write() -> None:
            k_out_ref[row, target] = k_read_ref[copy_idx]
            v_out_ref[row, target] = v_read_ref[copy_idx]

    lax.fori_loop(0, num_copies, read, None)
    lax.fori_loop(0, num_copies, write, None)


def block_copy_pallas(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_copy`."""
    # What was read waits in outputs that nobody looks at: scratch memory would need a backend.
    reads = tuple(
        jax.ShapeDtypeStruct((source_block_ids.shape[0], *cache.shape[2:]), cache.dtype)
        for cache in (k_cache, v_cache)
    )
    caches = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache))
    k_out, v_out, _, _ = pl.pallas_call(
        _row_kernel,
        out_shape=(*caches, *reads),
        grid=(k_cache.shape[0],),
        input_output_aliases={2: 0, 3: 1},
        interpret=True,
        name="block_copy",
    )(source_block_ids, target_block_ids, k_cache, v_cache)
    return k_out, v_out
