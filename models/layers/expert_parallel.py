"""Expert parallelism: each device of a mesh has its own experts, and every device has all rows.

A device sorts the choices of its own experts into tiles, multiplies these, and sums their weighted
outputs. The sums of all devices are then added. Arrays of tiles are split by device along their
first axis.
"""

import jax
import jax.numpy as jnp

from models.forward.kernel_settings import BY_DEVICE, WHOLE, KernelSettings
from models.weight_rule import MODEL_AXIS
from pallas_kernels import GroupTiles, make_group_tiles


def tiles_of_own_experts(
    expert_ids: jax.Array,  # i32[num_choices], in [0, num_experts]
    num_experts: int,
    kernels: KernelSettings,
) -> GroupTiles:
    """The tiles of all devices. Group 0 of a device's tiles is the first expert of the device.

    `places` is i32[num_devices * num_choices]: on each device, choices of other devices' experts
    have no place.
    """
    num_own = num_experts // kernels.num_shards
    tile_rows = kernels.tile_rows(expert_ids.size, num_experts)

    def on_device(expert_ids: jax.Array) -> GroupTiles:
        own_ids = expert_ids - jax.lax.axis_index(MODEL_AXIS) * num_own
        is_own = (own_ids >= 0) & (own_ids < num_own)
        group_ids = jnp.where(is_own, own_ids, num_own)
        return make_group_tiles(group_ids, num_groups=num_own, tile_rows=tile_rows)

    return kernels.by_device(on_device, expert_ids, in_specs=(WHOLE,), out_specs=BY_DEVICE)


def rows_of_tiles(
    x: jax.Array,  # f[num_rows, width]
    rows: jax.Array,  # i32[num_devices * num_tiles * tile_rows]
    kernels: KernelSettings,
) -> jax.Array:  # f[num_devices * num_tiles * tile_rows, width]
    """The row of x at each place; each device looks up the rows of its own tiles."""
    return kernels.by_device(
        lambda x, rows: x[rows], *(x, rows), in_specs=(WHOLE, BY_DEVICE), out_specs=BY_DEVICE
    )
