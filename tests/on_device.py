"""Makes arrays in NumPy and copies them to the device, for tests that should compile little.

`jnp.asarray` of a list, `jnp.zeros` and the like compile a program for each shape. This takes 20 to
60 ms of CPU time. The arguments here must be values on the host, not traced arrays.
"""

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def array(values: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """The values as an array on the device, as `jnp.asarray` returns it."""
    return jax.device_put(np.asarray(values, dtype))


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


def ones(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


def full(
    shape: int | tuple[int, ...], value: ArrayLike, dtype: DTypeLike = np.float32
) -> jax.Array:
    return jax.device_put(np.full(shape, value, dtype))


def arange(*bounds: int, dtype: DTypeLike = np.int32) -> jax.Array:
    return jax.device_put(np.arange(*bounds, dtype=dtype))
