"""Device arrays of zeros that need no program of their own."""

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike


def put_zeros(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
    """Zeros of the device's own; for arrays that the host can send in no time.

    `jnp.zeros` compiles a program for each shape, 0.03 s one after the other at every start. A
    donated array must not be the host's memory, which a put may share on a CPU unless told.
    """
    return jax.device_put(np.zeros(shape, dtype), sharding, may_alias=False)
