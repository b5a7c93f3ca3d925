"""The devices of an engine."""

import jax
import pytest

from paxkv.errors import ConfigError
from paxkv.runner.memory.device_mesh import device_mesh, find_mesh, mesh_of


def test_more_devices_than_there_are_is_a_config_error() -> None:
    num_devices = len(jax.devices())
    with pytest.raises(
        ConfigError, match=f"size={num_devices + 1} is more than the {num_devices} devices"
    ):
        find_mesh(num_devices + 1)


def test_one_device_needs_no_mesh() -> None:
    assert find_mesh(1) is None
    (device,) = jax.device_put(0).devices()
    assert mesh_of(jax.device_put(0)) == device_mesh(device)
