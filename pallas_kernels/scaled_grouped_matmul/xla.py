"""XLA body of `scaled_grouped_matmul`: widens an expert for each tile that has rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.number_format import NumberFormat
from pallas_kernels.scaled_matmul.xla import scaled_matmul_xla


def scaled_grouped_matmul_xla(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_experts, num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_experts, num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_experts, num_groups, out_features]
    tile_experts: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles], ignored: empty places are computed too
    *,
    number_format: NumberFormat,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `api.scaled_grouped_matmul`. Writes one widened matrix at a time to memory."""
    num_experts, out_features = numbers.shape[0], numbers.shape[-1]
    tile_rows = x.shape[0] // tile_experts.shape[0]
    num_used = (tile_experts < num_experts).sum(dtype=jnp.int32)

    def multiply(tile_idx: jax.Array, out: jax.Array) -> jax.Array:
        start = tile_idx * tile_rows
        tile = lax.dynamic_slice_in_dim(x, start, tile_rows, allow_negative_indices=False)
        own = jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(
                array, tile_experts[tile_idx], keepdims=False, allow_negative_indices=False
            ),
            (numbers, scales, zeros),
        )
        product = scaled_matmul_xla(tile, *own, number_format=number_format).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(
            out, product, start, axis=0, allow_negative_indices=False
        )

    return lax.fori_loop(0, num_used, multiply, jnp.zeros((x.shape[0], out_features), x.dtype))
