"""One file for each kind of processor: everything that depends on it is there."""

import jax

import pallas_kernels
from models.platforms.base import Platform
from models.platforms.cpu import CPU
from models.platforms.gpu import GPU
from models.platforms.tpu import TPU

__all__ = ["CPU", "GPU", "TPU", "Platform", "default_platform", "platform_of"]


def platform_of(device: jax.Device) -> Platform:
    """The platform of a device; if it is a CPU, of this machine's processor."""
    kinds = {"cpu": CPU.of_this_machine, "gpu": GPU, "tpu": TPU}
    return kinds.get(pallas_kernels.target_of(device).platform, Platform)()


def default_platform() -> Platform:
    """The platform of the device where JAX puts new arrays, which `jax.default_device` may set."""
    (device,) = jax.device_put(0).devices()
    return platform_of(device)
