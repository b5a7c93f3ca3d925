"""Puts a checkpoint's array onto the devices of a mesh: each device gets its own part."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models.platforms import Platform


def put_split(
    weight_np: np.ndarray,
    dtype: jnp.dtype,
    platform: Platform,
    *,
    is_transposed: bool,
    sharding: NamedSharding,
) -> jax.Array:
    """Puts the parts of an array on their devices, so that no device ever has the whole array.

    Args:
        sharding: Of the result.
    """
    turned_np = weight_np.swapaxes(-1, -2) if is_transposed else weight_np
    shape = turned_np.shape
    parts = [
        platform.put_weight(
            turned_np[index].swapaxes(-1, -2) if is_transposed else turned_np[index],
            dtype,
            is_transposed=is_transposed,
            device=device,
        )
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
