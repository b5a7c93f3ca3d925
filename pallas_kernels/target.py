"""The kind of device that a program is compiled for. It decides which body of an op is used."""

import functools
from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of device. Hashable, so that it can be a static argument."""

    platform: str  # "cpu", "gpu" or "tpu"
    device_kind: str = ""  # as JAX names it: "NVIDIA H200", "TPU v6 lite"
    compute_capability: str | None = None  # of an NVIDIA GPU: "9.0"


def target_of(device: jax.Device) -> Target:
    """The target of a device, which may be only a description (for ahead-of-time compiling)."""
    # A described CUDA device calls its platform "cuda", an attached one "gpu".
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None)
    return Target(
        platform=platform,
        device_kind=device.device_kind,
        compute_capability=None if capability is None else str(capability),
    )


@functools.cache
def default_target() -> Target:
    """The target of JAX's default device."""
    return target_of(jax.devices()[0])
