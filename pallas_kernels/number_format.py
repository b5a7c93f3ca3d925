"""`NumberFormat`: integers and small floats of 4 or 8 bits, which have scales per group."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

# - int4: -8 to 7 as 0 to 15, two in a byte
# - int8: -128 to 127
# - e4m3: floats of 8 bits: a sign, 4 bits of exponent, 3 of mantissa; without infinity
# - e2m1: floats of 4 bits: a sign, 2 bits of exponent, 1 of mantissa; two in a byte
NumberFormat = Literal["int4", "int8", "e4m3", "e2m1"]

# The number 0 as int4 stores it.
MIDDLE = 8
MAX_E4M3 = 448
# The bits of a small float are those of a float16 with a smaller exponent. These are the factors
# between the two.
_FACTORS: dict[NumberFormat, float] = {"e4m3": 2.0**8, "e2m1": 2.0**14}


def has_pairs(number_format: NumberFormat) -> bool:
    """Whether a byte holds two numbers."""
    return number_format in ("int4", "e2m1")


def split_bytes(numbers: jax.Array, number_format: NumberFormat) -> list[jax.Array]:
    """The numbers in the low bits, then those in the high bits; one array if they have 8 bits."""
    return [numbers & 15, numbers >> 4] if has_pairs(number_format) else [numbers]


def as_float32(
    numbers: jax.Array,  # u8 or i8, one number each
    number_format: NumberFormat,
) -> jax.Array:  # f32, of the same shape
    """Widens numbers. The caller multiplies them by `factor_of`. Numbers of int4 stay 0 to 15."""
    match number_format:
        case "int4" | "int8":
            # XLA:CPU widens bytes to 32-bit integers first, and has vector instructions for both.
            return numbers.astype(jnp.int32).astype(jnp.float32)
        case "e4m3":
            sign_bit, shift = 7, 7
        case "e2m1":
            sign_bit, shift = 3, 9
    bits = numbers.astype(jnp.uint16)
    magnitude = bits & (2**sign_bit - 1)
    bits = (bits >> sign_bit) << 15 | magnitude << shift
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def factor_of(number_format: NumberFormat) -> float:
    """The factor that results of `as_float32` must be multiplied by."""
    return _FACTORS.get(number_format, 1.0)


def widen_groups(
    numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, num_columns]
    scales: jax.Array,  # f32 or u8[num_groups, num_columns]
    zeros: jax.Array | None,  # u8[num_groups, num_columns]
    number_format: NumberFormat,
    dtype: jnp.dtype,
) -> jax.Array:  # dtype[num_rows, num_columns]
    """Computes `(number - zero) * scale` in float32, and rounds it once.

    A byte holds two numbers of 4 bits: row r of a group in its low bits, and row
    `r + bytes_per_group` in its high bits.
    """
    parts = jnp.concatenate(split_bytes(numbers, number_format), axis=1)
    values = as_float32(parts, number_format)
    own_zeros = zeros_as_float32(zeros, number_format, num_axes=scales.ndim)
    if own_zeros is not None:
        values -= own_zeros[:, None]
    values *= factor_of(number_format)
    values *= scales_as_float32(scales)[:, None]
    return values.astype(dtype).reshape(-1, values.shape[-1])


def zeros_as_float32(
    zeros: jax.Array | None, number_format: NumberFormat, *, num_axes: int
) -> jax.Array | None:  # f32, with `num_axes` axes
    """The zero points of numbers as `as_float32` returns them; None if they need none."""
    if number_format != "int4":
        return None
    if zeros is None:
        return jnp.full([1] * num_axes, MIDDLE, jnp.float32)
    return as_float32(zeros, "int4")


def scales_as_float32(scales: jax.Array) -> jax.Array:  # f32, of the same shape
    """Widens scales. Bytes are E8M0: the exponent of a float32, 1 to 254."""
    if scales.dtype != jnp.uint8:
        return scales
    return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
