"""Checks of small numbers with scales, which the ops that multiply them share."""

from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels.number_format import NumberFormat


def require_format(op_name: str, number_format: NumberFormat) -> None:
    """Checks the name of a format.

    Raises:
        ValueError: There is no such format.
    """
    if number_format not in get_args(NumberFormat):
        raise ValueError(
            f"{op_name}: number_format is {number_format!r}; wanted one of "
            f"{get_args(NumberFormat)}."
        )


def require_number_dtypes(
    op_name: str,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    number_format: NumberFormat,
) -> None:
    """Checks the dtypes of numbers, scales and zero points.

    Raises:
        ValueError: One does not fit the format, or a format without zero points has them.
    """
    byte = jnp.dtype(jnp.int8 if number_format == "int8" else jnp.uint8)
    if numbers.dtype != byte:
        raise ValueError(
            f"{op_name}: numbers of {number_format} are {numbers.dtype}; wanted {byte}."
        )
    if scales.dtype not in (jnp.float32, jnp.uint8):
        raise ValueError(f"{op_name}: scales are {scales.dtype}; wanted float32 or uint8.")
    if zeros is None:
        return
    if number_format != "int4":
        raise ValueError(f"{op_name}: zeros are only for int4; the format is {number_format}.")
    if zeros.dtype != jnp.uint8:
        raise ValueError(f"{op_name}: zeros are {zeros.dtype}; wanted uint8.")
