"""Two ways to bring a checkpoint's array to a device, cast and transposed."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from models.platforms.huge_pages import empty_in_huge_pages

# Rows that the host casts and transposes at a time, so that they stay in the processor's cache.
_ROWS_AT_A_TIME = 64


def cast_on_host(weight_np: np.ndarray, dtype: jnp.dtype, *, is_transposed: bool) -> jax.Array:
    """Casts on the host, into memory of the array's own.

    Args:
        is_transposed: Whether the last two axes are swapped.
    """
    shape = weight_np.shape
    if is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    array_np = empty_in_huge_pages(shape, dtype)
    target_np = array_np.swapaxes(-1, -2) if is_transposed else array_np
    with np.errstate(over="ignore"):  # numbers too large for float16 become infinite, as on a GPU
        for part in _parts(weight_np.shape):
            target_np[part] = weight_np[part].astype(dtype)
    return jax.device_put(array_np, may_alias=True)


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Indices of some rows of a matrix at a time; of a whole vector."""
    if len(shape) < 2:
        yield ()
        return
    for matrix_idx in np.ndindex(shape[:-2]):
        for start in range(0, shape[-2], _ROWS_AT_A_TIME):
            yield (*matrix_idx, slice(start, start + _ROWS_AT_A_TIME))


def cast_on_device(weight_np: np.ndarray, dtype: jnp.dtype, *, is_transposed: bool) -> jax.Array:
    """As `cast_on_host`, by a program of the device."""
    return _cast(jax.device_put(weight_np), dtype, is_transposed)


@functools.partial(jax.jit, static_argnames=("dtype", "is_transposed"))
def _cast(weight: jax.Array, dtype: jnp.dtype, is_transposed: bool) -> jax.Array:
    weight = weight.astype(dtype)
    # The copy is forced: a program that changes nothing may return its argument, which on a CPU
    # can be the reader's own memory.
    return weight.swapaxes(-1, -2) if is_transposed else jnp.copy(weight)
