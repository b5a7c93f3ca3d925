"""Public op `scaled_grouped_matmul`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import (
    require_float,
    require_int32,
    require_not_empty,
    require_shape,
)
from pallas_kernels.dispatch import Body, mosaic_bodies, preferred_body, run_op
from pallas_kernels.number_format import NumberFormat, has_pairs
from pallas_kernels.scaled_grouped_matmul.reference import scaled_grouped_matmul_reference
from pallas_kernels.scaled_grouped_matmul.xla import scaled_grouped_matmul_xla
from pallas_kernels.scaled_matmul.number_checks import require_format, require_number_dtypes
from pallas_kernels.target import Target

_OP = "scaled_grouped_matmul"
_BODIES: dict[str, Body] = {
    "reference": scaled_grouped_matmul_reference,
    "xla": scaled_grouped_matmul_xla,
    **mosaic_bodies("pallas_kernels.scaled_grouped_matmul", "scaled_grouped_matmul", "gpu"),
}


def scaled_grouped_matmul(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_experts, num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_experts, num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_experts, num_groups, out_features]
    tile_experts: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    number_format: NumberFormat,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """Multiplies each tile of rows with the matrix of its expert, as `grouped_matmul` does.

    The matrix of an expert is `(number - zero) * scale`, as in `scaled_matmul`. Numbers of experts
    without tiles are not read, except by the body "reference". The body "xla" rounds each widened
    number to x's dtype. The others do not round it.

    Args:
        x: As in `grouped_matmul`.
        numbers: The numbers of each expert, as in `scaled_matmul`.
        scales: As in `scaled_matmul`, of each expert.
        zeros: As in `scaled_matmul`, of each expert.
        tile_experts: The expert of each tile; `num_experts` for tiles without rows, which come
            last.
        tile_sizes: As in `grouped_matmul`.
        number_format: See `pallas_kernels.number_format`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The products in x's dtype, summed in float32. Rows of tiles without an expert are undefined.

    Raises:
        ValueError: A shape, a dtype, the format or the implementation's name does not fit.
    """
    require_format(_OP, number_format)
    require_shape(_OP, "x", x, ("num_tiles * tile_rows", "in_features"))
    wanted = ("num_experts", "num_groups", "bytes_per_group", "out_features")
    require_shape(_OP, "numbers", numbers, wanted)
    num_experts, num_groups, num_bytes, out_features = numbers.shape
    in_features = num_groups * num_bytes * (2 if has_pairs(number_format) else 1)
    require_shape(_OP, "x", x, ("num_tiles * tile_rows", in_features))
    require_shape(_OP, "scales", scales, (num_experts, num_groups, out_features))
    if zeros is not None:
        require_shape(_OP, "zeros", zeros, scales.shape)
    require_shape(_OP, "tile_experts", tile_experts, ("num_tiles",))
    require_shape(_OP, "tile_sizes", tile_sizes, tile_experts.shape)
    require_int32(_OP, tile_experts=tile_experts, tile_sizes=tile_sizes)
    require_float(_OP, x=x)
    for arg_name, array in (("x", x), ("numbers", numbers), ("tile_experts", tile_experts)):
        require_not_empty(_OP, arg_name, array)
    if x.shape[0] % tile_experts.shape[0]:
        raise ValueError(
            f"{_OP}: x has {x.shape[0]} rows; wanted a multiple of the number of tiles, "
            f"{tile_experts.shape[0]}."
        )
    require_number_dtypes(_OP, numbers, scales, zeros, number_format)
    return run_op(
        *(_OP, _BODIES, implementation, target),
        *(x, numbers, scales, zeros, tile_experts, tile_sizes),
        number_format=number_format,
    )


def scaled_grouped_matmul_body(
    x: jax.Array,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    tile_experts: jax.Array,
    tile_sizes: jax.Array,
    *,
    number_format: NumberFormat,
    target: Target,
) -> str:
    """The body that `scaled_grouped_matmul` picks on `target`; arrays may be abstract."""
    arrays = (x, numbers, scales, zeros, tile_experts, tile_sizes)
    return preferred_body(_OP, _BODIES, target, *arrays, number_format=number_format)
