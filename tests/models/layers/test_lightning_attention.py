"""Tests of `models/layers/lightning_attention.py`: the decays of its heads."""

import numpy as np
import pytest

from models.layers.lightning_attention import slope_rule


@pytest.mark.parametrize(("layer_idx", "share"), [(0, 1.0), (3, 0.4), (5, 0.0)])
def test_slopes_that_a_checkpoint_lacks_are_computed(layer_idx: int, share: float) -> None:
    rule = slope_rule("x", 4, layer_idx=layer_idx, num_layers=6)
    wanted = share * np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    np.testing.assert_allclose(np.exp(rule.combine([])), wanted, atol=2e-5)
    stored = np.array([0.5, 0.25, 0.125, 1.0], np.float32).reshape(4, 1, 1)
    np.testing.assert_allclose(np.exp(rule.combine([stored])), stored.reshape(-1), rtol=1e-6)
