"""The mesh of an engine's devices."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.weight_rule import MODEL_AXIS, is_whole
from paxkv.errors import ConfigError


def find_mesh(num_devices: int) -> Mesh | None:
    """Returns a mesh of devices of the default kind; None stands for JAX's default device.

    If there are several processes, each has an equal part of the devices.

    Raises:
        ConfigError: A process has fewer devices than its part of the mesh.
    """
    if num_devices == 1:
        return None
    (default,) = jax.device_put(0).devices()
    num_processes = jax.process_count(default.platform)
    num_each = num_devices // num_processes
    parts = [jax.local_devices(rank, default.platform) for rank in range(num_processes)]
    for rank, devices in enumerate(parts):
        if len(devices) < num_each:
            where = f" of host {rank} (nnodes={num_processes})" if num_processes > 1 else ""
            raise ConfigError(
                f"tensor_parallel_size={num_devices} is more than the {len(devices)} devices "
                f"that JAX has{where} ({default.device_kind}). Lower it, or make more devices "
                "visible."
            )
    return device_mesh(*(device for devices in parts for device in devices[:num_each]))


def device_mesh(*devices: jax.Device) -> Mesh:
    """Returns a mesh of these devices. Its axis is the axis over which heads are split."""
    return Mesh(np.array(devices), (MODEL_AXIS,), axis_types=(AxisType.Auto,))


def logits_sharding(mesh: Mesh, vocab_size: int) -> NamedSharding:
    """How logits f32[num_rows, vocab] are split: as the vocabulary head is."""
    is_split = not is_whole("vocab", vocab_size, mesh.size, splits_kv_heads=True)
    spec = PartitionSpec(None, MODEL_AXIS) if is_split else PartitionSpec()
    return NamedSharding(mesh, spec)


def keep_split(
    logits: jax.Array,  # f32[num_rows, vocab] or f32[num_rows, num_vocab_groups, group_size]
    mesh: Mesh | None,
) -> jax.Array:
    """Keeps logits split over the devices of a mesh, if there is one.

    Without this, JAX 0.11 gathers them at the end of a branch.
    """
    if mesh is None:
        return logits
    return jax.lax.with_sharding_constraint(logits, logits_sharding(mesh, logits.shape[1]))


def mesh_of(param: jax.Array) -> Mesh:
    """Returns the mesh of a parameter, or a mesh of the device that has it."""
    sharding = param.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else device_mesh(*param.devices())
