"""The sparse gate keeps what is far above its mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.sparse_gate_mlp import SparseGateMLP


def test_gate_below_the_cutoff_is_zero():
    mlp = SparseGateMLP(2, 4, activation="relu2", sparsity=0.5, dtype=jnp.float32)
    # The mean is 2, and half of a normal distribution is below it.
    gate = jnp.array([[0.0, 1.0, 2.0, 5.0]])
    np.testing.assert_allclose(mlp._activated(gate), [[0.0, 0.0, 0.0, 9.0]])


def test_cutoff_is_that_of_the_share():
    mlp = SparseGateMLP(2, 4, activation="silu", sparsity=0.95, dtype=jnp.float32)
    assert mlp.cutoff == pytest.approx(1.6448536)
    gate = jnp.asarray(np.random.default_rng(0).standard_normal((1, 10_000)), jnp.float32)
    share = float((mlp._activated(gate) == 0).mean())
    assert share == pytest.approx(0.95, abs=0.005)
