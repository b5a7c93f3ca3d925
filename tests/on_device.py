"""Arrays on the device without a program: `jnp.asarray` and `jnp.zeros` compile one per shape.

Such a program takes 20 to 60 ms of CPU time to compile. The arguments must not be traced.
"""

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def array(values: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """`jnp.asarray` of numbers on the host."""
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
