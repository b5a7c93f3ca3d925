"""The definition of `scaled_grouped_matmul`, kept short: it widens the matrix of every tile."""

import functools

import jax

from pallas_kernels.number_format import NumberFormat
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference


def scaled_grouped_matmul_reference(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_experts, num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_experts, num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_experts, num_groups, out_features]
    tile_experts: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    number_format: NumberFormat,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `api.scaled_grouped_matmul`."""
    tiles = x.reshape(tile_experts.shape[0], -1, x.shape[1])
    own = jax.tree.map(
        lambda array: array.at[tile_experts].get(mode="clip"), (numbers, scales, zeros)
    )
    multiply = functools.partial(scaled_matmul_reference, number_format=number_format)
    return jax.vmap(multiply)(tiles, *own).reshape(x.shape[0], -1).astype(x.dtype)
