"""XLA body of `grouped_matmul`: a loop over the tiles that have rows."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values

# On a CPU, one iteration of the loop adds up this many rows of a matrix.
_UNROLLED = 8
# On a CPU, tiles with at most this many rows are computed without their empty places.
_FEW_ROWS = 2


# The jit makes JAX trace it once for all layers and programs that call it with the same shapes.
@functools.partial(jax.jit, static_argnames="weights_dtype")
def grouped_matmul_xla(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    weights: jax.Array,  # f or u16[num_groups, in_features, out_features]
    tile_groups: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    weights_dtype: jnp.dtype | None,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `api.grouped_matmul`. Reads only the matrices of groups that have rows.

    On a CPU, XLA would copy the matrix of a group before each product. If the weights are bfloat16,
    it would convert all of them first. The CPU's code is therefore a sum of outer products, in a
    loop that reads the rows of a matrix in place.
    """
    num_groups, _, out_features = weights.shape
    tile_rows = x.shape[0] // tile_groups.shape[0]
    num_used = (tile_groups < num_groups).sum(dtype=jnp.int32)

    def multiply(tile_idx: jax.Array, out: jax.Array) -> jax.Array:
        start = tile_idx * tile_rows
        tile = lax.dynamic_slice_in_dim(x, start, tile_rows, allow_negative_indices=False)
        product = lax.platform_dependent(
            *(tile, weights, tile_groups[tile_idx], tile_sizes[tile_idx]),
            cpu=lambda *args: _multiply_on_cpu(*args, weights_dtype),
            default=lambda *args: _multiply(*args, weights_dtype),
        )
        return lax.dynamic_update_slice_in_dim(
            out, product.astype(x.dtype), start, axis=0, allow_negative_indices=False
        )

    return lax.fori_loop(0, num_used, multiply, jnp.zeros((x.shape[0], out_features), x.dtype))


def _multiply(
    tile: jax.Array,  # f[tile_rows, in_features]
    weights: jax.Array,
    group: jax.Array,  # i32[]
    size: jax.Array,  # i32[], ignored: empty places are computed too
    weights_dtype: jnp.dtype | None,
) -> jax.Array:  # f32[tile_rows, out_features]
    own = lax.dynamic_index_in_dim(weights, group, keepdims=False, allow_negative_indices=False)
    precision = lax.Precision.HIGHEST if tile.dtype == jnp.float32 else None
    return jnp.dot(
        tile,
        as_values(own, weights_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _multiply_on_cpu(
    tile: jax.Array,  # f[tile_rows, in_features]
    weights: jax.Array,
    group: jax.Array,  # i32[]
    size: jax.Array,  # i32[], how many rows the tile has
    weights_dtype: jnp.dtype | None,
) -> jax.Array:  # f32[tile_rows, out_features]
    if tile.shape[0] <= _FEW_ROWS:
        return _sum_outer_products(tile, weights, group, weights_dtype)

    def multiply_few() -> jax.Array:
        product = _sum_outer_products(tile[:_FEW_ROWS], weights, group, weights_dtype)
        return jnp.pad(product, ((0, tile.shape[0] - _FEW_ROWS), (0, 0)))

    return lax.cond(
        size <= _FEW_ROWS,
        multiply_few,
        lambda: _sum_outer_products(tile, weights, group, weights_dtype),
    )


def _sum_outer_products(
    tile: jax.Array,  # f[tile_rows, in_features]
    weights: jax.Array,
    group: jax.Array,  # i32[]
    weights_dtype: jnp.dtype | None,
) -> jax.Array:  # f32[tile_rows, out_features]
    """The product as a sum of outer products, in an order that depends only on the shapes."""
    tile_rows, in_features = tile.shape
    out_features = weights.shape[2]
    num_unrolled = math.gcd(_UNROLLED, in_features)
    num_turns = in_features // num_unrolled
    columns = tile.astype(jnp.float32).T.reshape(num_unrolled, num_turns, tile_rows)
    rows = weights.reshape(-1, num_unrolled, num_turns, out_features)

    def add(turn: jax.Array, total: jax.Array) -> jax.Array:
        for part in range(num_unrolled):
            row = lax.dynamic_slice(
                *(rows, (group, part, turn, 0), (1, 1, 1, out_features)),
                allow_negative_indices=False,
            ).reshape(out_features)
            row = as_values(row, weights_dtype).astype(jnp.float32)
            column = lax.dynamic_index_in_dim(
                columns[part], turn, keepdims=False, allow_negative_indices=False
            )
            # A single row of x needs no second axis. XLA would make a loop of one turn for it.
            product = row * column[0] if tile_rows == 1 else row[:, None] * column
            total = total + product
        return total

    shape = (out_features,) if tile_rows == 1 else (out_features, tile_rows)
    total = lax.fori_loop(0, num_turns, add, jnp.zeros(shape, jnp.float32))
    return total[None] if tile_rows == 1 else total.T
