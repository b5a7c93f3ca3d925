"""Public op `scaled_matmul`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_not_empty, require_shape
from pallas_kernels.dispatch import Body, mosaic_bodies, preferred_body, run_op
from pallas_kernels.number_format import NumberFormat, has_pairs
from pallas_kernels.scaled_matmul.number_checks import require_format, require_number_dtypes
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference
from pallas_kernels.scaled_matmul.xla import scaled_matmul_xla
from pallas_kernels.target import Target

_OP = "scaled_matmul"
_BODIES: dict[str, Body] = {
    "reference": scaled_matmul_reference,
    "xla": scaled_matmul_xla,
    **mosaic_bodies("pallas_kernels.scaled_matmul", "scaled_matmul", "gpu"),
}


def scaled_matmul(
    x: jax.Array,  # f[num_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_groups, out_features]
    zeros: jax.Array | None = None,  # u8[num_groups, out_features]
    *,
    number_format: NumberFormat,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # f32[num_rows, out_features]
    """Multiplies rows with the matrix `(number - zero) * scale`.

    Numbers of one output and one group of inputs share a scale and a zero. Activations are not
    rounded. The body "xla" rounds each widened number to x's dtype. The others do not round it.

    Args:
        numbers: Bytes: int8 for the format "int8", otherwise uint8. A byte holds two numbers of 4
            bits: input i of a group in its low bits, and input `i + bytes_per_group` in its high
            bits.
        scales: If uint8, exponents of float32 (E8M0), 1 to 254.
        zeros: 0 to 15, only for "int4". None means 8 for "int4".
        number_format: See `pallas_kernels.number_format`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The products, summed in float32.

    Raises:
        ValueError: A shape, a dtype, the format or the implementation's name does not fit.
    """
    require_format(_OP, number_format)
    require_shape(_OP, "x", x, ("num_rows", "in_features"))
    require_shape(_OP, "numbers", numbers, ("num_groups", "bytes_per_group", "out_features"))
    num_groups, num_bytes, out_features = numbers.shape
    in_features = num_groups * num_bytes * (2 if has_pairs(number_format) else 1)
    require_shape(_OP, "x", x, ("num_rows", in_features))
    require_shape(_OP, "scales", scales, (num_groups, out_features))
    if zeros is not None:
        require_shape(_OP, "zeros", zeros, scales.shape)
    require_float(_OP, x=x)
    for arg_name, array in (("x", x), ("numbers", numbers)):
        require_not_empty(_OP, arg_name, array)
    require_number_dtypes(_OP, numbers, scales, zeros, number_format)
    return run_op(
        *(_OP, _BODIES, implementation, target, x, numbers, scales, zeros),
        number_format=number_format,
    )


def scaled_matmul_body(
    x: jax.Array,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    number_format: NumberFormat,
    target: Target,
) -> str:
    """The body that `scaled_matmul` picks on `target`; arrays may be abstract."""
    arrays = (x, numbers, scales, zeros)
    return preferred_body(_OP, _BODIES, target, *arrays, number_format=number_format)
