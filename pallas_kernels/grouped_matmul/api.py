"""Public op `grouped_matmul`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    is_wide_float,
    require_float,
    require_int32,
    require_not_empty,
    require_shape,
)
from pallas_kernels.dispatch import Body, mosaic_bodies, preferred_body, run_op
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from pallas_kernels.stored_dtype import BITS_DTYPE, KV_DTYPES
from pallas_kernels.target import Target

_OP = "grouped_matmul"
_BODIES: dict[str, Body] = {
    "reference": grouped_matmul_reference,
    "xla": grouped_matmul_xla,
    **mosaic_bodies("pallas_kernels.grouped_matmul", "grouped_matmul", "gpu"),
}


def grouped_matmul(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    weights: jax.Array,  # f[num_groups, in_features, out_features]
    tile_groups: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    weights_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """Multiplies each tile of rows with the matrix of its group.

    Example: tiles of 2 rows, `tile_groups` [3, 3, 5], 5 groups -> rows 0 to 3 are multiplied with
    `weights[3]`. Group 5 does not exist, so rows 4 and 5 of the result are undefined.

    A row's result depends on the row, the matrix and the shapes alone. Only the "reference" body
    reads the matrices of groups without tiles.

    Args:
        x: Rows at the places that `make_group_tiles` gives them. Places without a row may hold
            anything.
        weights: In x's dtype, or uint16 with the bits of `weights_dtype`. XLA:CPU converts bfloat16
            weights of all groups at every call. It does not convert uint16.
        tile_groups: The group of each tile; `num_groups` for tiles without rows, which come last.
        tile_sizes: The number of rows in each tile. The rows are the first places of the tile; a
            body may skip the other places.
        weights_dtype: The 16-bit float whose bits uint16 weights hold. None for other weights.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The products in x's dtype, summed in float32.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit.

    Source: MegaBlocks, arXiv:2211.15841, section 5.
    """
    require_shape(_OP, "x", x, ("num_tiles * tile_rows", "in_features"))
    wanted = ("num_groups", x.shape[1], "out_features")
    require_shape(_OP, "weights", weights, wanted)
    require_shape(_OP, "tile_groups", tile_groups, ("num_tiles",))
    require_shape(_OP, "tile_sizes", tile_sizes, tile_groups.shape)
    require_int32(_OP, tile_groups=tile_groups, tile_sizes=tile_sizes)
    require_float(_OP, x=x)
    for arg_name, array in (("x", x), ("weights", weights), ("tile_groups", tile_groups)):
        require_not_empty(_OP, arg_name, array)
    if x.shape[0] % tile_groups.shape[0]:
        raise ValueError(
            f"{_OP}: x has {x.shape[0]} rows; wanted a multiple of the number of tiles, "
            f"{tile_groups.shape[0]}."
        )
    _check_weights_dtype(weights.dtype, weights_dtype, x.dtype)
    return run_op(
        *(_OP, _BODIES, implementation, target, x, weights, tile_groups, tile_sizes),
        weights_dtype=None if weights_dtype is None else jnp.dtype(weights_dtype),
    )


def grouped_matmul_body(
    x: jax.Array,
    weights: jax.Array,
    tile_groups: jax.Array,
    tile_sizes: jax.Array,
    *,
    target: Target,
) -> str:
    """The body that `grouped_matmul` picks on `target`; arrays may be abstract."""
    arrays = (x, weights, tile_groups, tile_sizes)
    return preferred_body(_OP, _BODIES, target, *arrays, weights_dtype=None)


def _check_weights_dtype(
    stored: jnp.dtype, weights_dtype: jnp.dtype | None, x_dtype: jnp.dtype
) -> None:
    if stored == BITS_DTYPE:
        if weights_dtype is None or jnp.dtype(weights_dtype).name not in KV_DTYPES:
            raise ValueError(
                f"{_OP}: uint16 weights need weights_dtype, the float whose bits they hold: got "
                f"{weights_dtype}, wanted one of {sorted(KV_DTYPES)}."
            )
        stored = jnp.dtype(weights_dtype)
    elif weights_dtype is not None:
        raise ValueError(
            f"{_OP}: weights_dtype is only for uint16 weights: got {jnp.dtype(weights_dtype)} "
            f"with weights of {stored}. Leave it at None."
        )
    if not is_wide_float(stored) or stored != x_dtype:
        raise ValueError(f"{_OP}: weights are {stored}; wanted x's dtype, {x_dtype}.")
