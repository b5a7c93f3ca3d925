"""Checks of shapes, dtypes and numbers that the public ops share."""

import math
import numbers

import jax
import jax.numpy as jnp


def require_shape(
    op_name: str, arg_name: str, array: jax.Array, wanted: tuple[int | str, ...]
) -> None:
    """Checks a shape against sizes (int) and free dimensions (their names).

    Raises:
        ValueError: The rank or a size differs, or the argument is not an array.
    """
    _require_array(op_name, arg_name, array)
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
        ValueError: An array has another dtype.
    """
    for arg_name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(
                f"{op_name}: {arg_name} has the wrong dtype: got {array.dtype}, wanted int32."
            )


def require_sequences(
    op_name: str,
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
) -> None:
    """Checks the arrays that describe the sequences of a batch.

    Raises:
        ValueError: A shape or a dtype differs.
    """
    require_shape(op_name, "block_tables", block_tables, ("num_reqs", "max_blocks_per_req"))
    num_reqs = block_tables.shape[0]
    require_shape(op_name, "seq_lens", seq_lens, (num_reqs,))
    require_shape(op_name, "query_start_loc", query_start_loc, (num_reqs + 1,))
    require_int32(
        op_name, block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc
    )


def require_float(op_name: str, **arrays: jax.Array) -> None:
    """Checks that arrays of values are of a float dtype of 16 bits or more.

    Raises:
        ValueError: An array has another dtype.
    """
    for arg_name, array in arrays.items():
        if not is_wide_float(array.dtype):
            raise ValueError(
                f"{op_name}: {arg_name} has the wrong dtype: got {array.dtype}, "
                "wanted a float of 16 bits or more."
            )


def is_wide_float(dtype: jnp.dtype) -> bool:
    """Whether a dtype is a float of 16 bits or more. JAX does not promote narrower floats."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def require_scalar(op_name: str, arg_name: str, array: jax.Array) -> None:
    """Checks that an array is one int32, `i32[]`; offsets of a narrower integer would overflow.

    Raises:
        ValueError: It is not.
    """
    _require_array(op_name, arg_name, array)
    if array.shape != () or array.dtype != jnp.int32:
        raise ValueError(
            f"{op_name}: {arg_name} must be one integer: "
            f"got {array.dtype}{list(array.shape)}, wanted int32[]."
        )


def require_at_least(op_name: str, arg_name: str, value: int, minimum: int) -> None:
    """Checks that a static number is an integer of `minimum` or more that fits int32.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, numbers.Integral):
        raise ValueError(
            f"{op_name}: {arg_name} must be an integer: got {value!r}, wanted at least {minimum}."
        )
    if value < minimum:
        raise ValueError(
            f"{op_name}: {arg_name} is too small: got {value}, wanted at least {minimum}."
        )
    largest = jnp.iinfo(jnp.int32).max
    if value > largest:
        raise ValueError(
            f"{op_name}: {arg_name} is too large: got {value}, wanted at most {largest}."
        )


def require_finite(op_name: str, arg_name: str, value: float) -> None:
    """Checks that a static number is neither infinite nor NaN.

    Raises:
        ValueError: It is not.
    """
    if not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise ValueError(f"{op_name}: {arg_name} must be a finite number: got {value!r}.")


def require_not_empty(op_name: str, arg_name: str, array: jax.Array) -> None:
    """Checks that an array has elements.

    Raises:
        ValueError: It has none.
    """
    if 0 in array.shape:
        raise ValueError(
            f"{op_name}: {arg_name} is empty: got {list(array.shape)}, wanted no axis of size 0."
        )


def _require_array(op_name: str, arg_name: str, value: object) -> None:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ValueError(
            f"{op_name}: {arg_name} must be an array: got {value!r} of {type(value).__name__}."
        )
