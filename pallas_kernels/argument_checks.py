"""Checks of shapes and dtypes that the public ops share; their errors say got and wanted."""

import jax
import jax.numpy as jnp


def require_shape(
    op_name: str, arg_name: str, array: jax.Array, wanted: tuple[int | str, ...]
) -> None:
    """Checks a shape against sizes (int) and free dimensions (their names).

    Raises:
        ValueError: The rank or a size differs.
    """
    fits = len(array.shape) == len(wanted) and all(
        isinstance(size, str) or size == got for got, size in zip(array.shape, wanted, strict=True)
    )
    if not fits:
        dims = ", ".join(str(size) for size in wanted)
        raise ValueError(
            f"{op_name}: {arg_name} has the wrong shape: got {list(array.shape)}, wanted [{dims}]."
        )


def require_int32(op_name: str, **arrays: jax.Array) -> None:
    """Checks that arrays of indices are int32.

    Raises:
        ValueError: One is not.
    """
    for arg_name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(
                f"{op_name}: {arg_name} has the wrong dtype: got {array.dtype}, wanted int32."
            )


def require_float(op_name: str, **arrays: jax.Array) -> None:
    """Checks that arrays of values are of a float dtype.

    Raises:
        ValueError: One is not.
    """
    for arg_name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{op_name}: {arg_name} has the wrong dtype: got {array.dtype}, wanted a float."
            )


def require_scalar(op_name: str, arg_name: str, array: jax.Array) -> None:
    """Checks that an array is one integer, `i32[]`; a narrower one would overflow in an offset.

    Raises:
        ValueError: It is not.
    """
    if array.shape != () or array.dtype != jnp.int32:
        raise ValueError(
            f"{op_name}: {arg_name} must be one integer: "
            f"got {array.dtype}{list(array.shape)}, wanted int32[]."
        )


def require_at_least(op_name: str, arg_name: str, value: int, minimum: int) -> None:
    """Checks a static integer against its smallest allowed value.

    Raises:
        ValueError: It is below.
    """
    if value < minimum:
        raise ValueError(
            f"{op_name}: {arg_name} is too small: got {value}, wanted at least {minimum}."
        )
