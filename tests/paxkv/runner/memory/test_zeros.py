"""Zeros that a host sends compile nothing, and are the device's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import SingleDeviceSharding

from paxkv.runner.memory.zeros import put_zeros

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def num_compiles():
    events = []

    def listen(event, duration_secs, **_):
        events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield lambda: events.count(COMPILE_EVENT)
    monitoring.unregister_event_duration_listener(listen)


def test_zeros_compile_nothing(num_compiles):
    sharding = SingleDeviceSharding(jax.devices()[0])
    array = put_zeros((3, 4099), jnp.int32, sharding)
    assert (array.shape, array.dtype, array.sharding) == ((3, 4099), jnp.int32, sharding)
    assert num_compiles() == 0
    jnp.zeros((3, 4099), jnp.int32, device=sharding).block_until_ready()
    assert num_compiles() > 0


def test_a_program_that_overwrites_them_does_not_change_the_hosts_memory(monkeypatch):
    sent = []
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda *args: sent.append(zeros(*args)) or sent[-1])
    array = put_zeros((4096,), jnp.float32, SingleDeviceSharding(jax.devices()[0]))
    monkeypatch.undo()
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert (np.asarray(add(array)) == 1).all()
    assert array.is_deleted()
    assert (sent[0] == 0).all()
