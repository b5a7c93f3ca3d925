"""Simple Pallas body of `kv_scatter`, one grid step a token. Runs in interpret mode only."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def _token_kernel(
    slots_ref: jax.Array,  # i32[num_tokens]
    row_ref: jax.Array,  # i32[1]
    k_ref: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v_ref: jax.Array,  # f[num_tokens, num_kv_heads, v_head_dim]
    _k_cache_ref: jax.Array,  # the same memory as k_out_ref
    _v_cache_ref: jax.Array,  # the same memory as v_out_ref
    k_out_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_out_ref: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
) -> None:
    _, num_blocks, _, block_size, _ = k_out_ref.shape
    token_idx = pl.program_id(0)
    slot = slots_ref[token_idx]

    @pl.when((slot >= 0) & (slot < num_blocks * block_size))
    def _write() -> None:
        row = row_ref[0]
        block_id = slot // block_size
        offset = slot % block_size
        k_out_ref[row, block_id, :, offset, :] = k_ref[token_idx].astype(k_out_ref.dtype)
        v_out_ref[row, block_id, :, offset, :] = v_ref[token_idx].astype(v_out_ref.dtype)


def kv_scatter_pallas(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # f[num_tokens, num_kv_heads, v_head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_scatter`."""
    k_out, v_out = pl.pallas_call(
        _token_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ),
        grid=(slots.shape[0],),
        input_output_aliases={4: 0, 5: 1},
        interpret=True,
        name="kv_scatter",
    )(slots, jnp.asarray(row, jnp.int32).reshape(1), k, v, k_cache, v_cache)
    return k_out, v_out
