"""The check of the memory for weights asks this process's devices only."""

import types

import jax
import pytest

from models.errors import ModelError
from models.loading.weight_memory import check_weight_memory


class OwnDevice:
    def memory_stats(self):
        return {"bytes_limit": 2**30}


class DeviceOfAnotherHost:
    def memory_stats(self):
        raise jax.errors.JaxRuntimeError("MemoryStats is only supported for addressable devices.")


class SharedGigabyte:
    """Divides 1 GiB among the devices, as the CPU does with the host's memory."""

    def free_bytes_for_weights(self, devices):
        return min(device.memory_stats()["bytes_limit"] for device in devices) // len(devices)


def test_devices_of_other_hosts_are_not_asked_and_do_not_share_the_memory():
    own = OwnDevice()
    mesh = types.SimpleNamespace(
        local_devices=[own], devices=types.SimpleNamespace(flat=[own, DeviceOfAnotherHost()])
    )
    check_weight_memory(2**30, mesh, SharedGigabyte(), file_bytes=None)
    with pytest.raises(ModelError, match=r"the device, where 1,024\.0 MiB are free"):
        check_weight_memory(2**30 + 1, mesh, SharedGigabyte(), file_bytes=None)
