"""Tests of `target.py`."""

import types

import jax
import pytest

from pallas_kernels.target import Target, default_target, target_of


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_attached_and_described_gpus_are_one_kind(platform):
    device = types.SimpleNamespace(
        platform=platform, device_kind="NVIDIA H200", compute_capability="9.0"
    )
    assert target_of(device) == Target(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"
    )


def test_a_device_without_compute_capability_has_none():
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    assert target_of(device) == Target(platform="tpu", device_kind="TPU v6 lite")


def test_compute_capability_becomes_a_string():
    device = types.SimpleNamespace(platform="gpu", device_kind="x", compute_capability=10.0)
    assert target_of(device).compute_capability == "10.0"


def test_the_default_target_is_the_first_device():
    assert default_target() == target_of(jax.devices()[0])
    assert default_target().platform == "cpu"


def test_a_target_can_be_a_static_argument():
    traces = []

    def body(x, target):
        traces.append(target)
        return x

    jitted = jax.jit(body, static_argnames="target")
    for _ in range(2):
        jitted(1.0, target=Target(platform="gpu", compute_capability="9.0"))
    assert len(traces) == 1
