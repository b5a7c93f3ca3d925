"""Compares the memory that a model's weights need with the free memory, before they are read."""

import logging

import jax
from jax.sharding import Mesh

from models.errors import ModelError
from models.platforms import Platform

logger = logging.getLogger(__name__)


def check_weight_memory(
    num_bytes: int,
    mesh: Mesh | None,
    platform: Platform,
    *,
    file_bytes: int | None,
) -> None:
    """Logs how much memory the weights will need.

    Args:
        num_bytes: Bytes of weights on each device.
        mesh: As in `load_model`. Each process checks its own devices.
        file_bytes: Bytes of the files that are read. None: the weights are random.

    Raises:
        ModelError: A device has less free memory.
    """
    # JAX reads the memory only of devices of this process.
    devices = [jax.devices()[0]] if mesh is None else mesh.local_devices
    where = "the device" if len(devices) == 1 else f"each of {len(devices)} devices"
    needed = f"about {num_bytes / 2**20:,.1f} MiB on {where}"
    free_bytes = platform.free_bytes_for_weights(devices)
    free = "" if free_bytes is None else f", where {free_bytes / 2**20:,.1f} MiB are free"
    of_files = "" if file_bytes is None else f"{file_bytes / 2**20:,.1f} MiB in files, "
    logger.info("loading weights: %s%s%s", of_files, needed, free)
    if free_bytes is not None and num_bytes > free_bytes:
        raise ModelError(
            f"the weights need {needed}{free}. Quantize them (quantization int8 or int4), use more "
            "devices (tensor_parallel_size), or end other processes."
        )
