"""Makes device arrays of zeros without compiling a program."""

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike


def put_zeros(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
    """Makes an array of zeros on the device, by a copy from the host. For small arrays.

    `jnp.zeros` would compile a program for each shape, which takes 0.03 s each at every start. The
    array may be donated, so it must not share the host's memory. On a CPU, `may_alias=False` keeps
    `device_put` from sharing it.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(np.zeros(shape, dtype), sharding, may_alias=False)
    # `device_put` would compare the processes' arrays, by a program.
    part = np.zeros(sharding.shard_shape(shape), dtype)
    devices = sharding.addressable_devices
    parts = [jax.device_put(part, device, may_alias=False) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
