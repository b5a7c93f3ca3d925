"""Zeros that a host sends are the device's own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from paxkv.runner.zeros import put_zeros


def test_zeros_compile_nothing_and_may_be_donated(monkeypatch):
    sharding = SingleDeviceSharding(jax.devices()[0])
    sent = []
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda *args: sent.append(zeros(*args)) or sent[-1])
    with jax.log_compiles(False), jax.disable_jit():  # nothing to compile
        array = put_zeros((3, 4096), jnp.int32, sharding)
    monkeypatch.undo()
    assert (array.shape, array.dtype, array.sharding) == ((3, 4096), jnp.int32, sharding)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert (np.asarray(add(array)) == 1).all()
    assert array.is_deleted()
    assert (sent[0] == 0).all()
