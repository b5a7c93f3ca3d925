"""Soft caps bound logits and hardly change small ones."""

import math

import jax.numpy as jnp
import numpy as np

from models.layers.soft_cap import soft_cap_logits


def test_cap_by_hand():
    capped = soft_cap_logits(jnp.array([0.01, 3.0, -1e6]), 30.0)
    np.testing.assert_allclose(capped, [0.01, 30 * math.tanh(0.1), -30.0], rtol=1e-6)


def test_no_cap_changes_nothing():
    assert soft_cap_logits(jnp.array([1e6]), None).tolist() == [1e6]
