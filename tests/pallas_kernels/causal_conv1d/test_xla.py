"""Tests of `causal_conv1d/xla.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.causal_conv1d.cases import CASES, build_inputs
from pallas_kernels.causal_conv1d.reference import causal_conv1d_reference
from pallas_kernels.causal_conv1d.xla import causal_conv1d_xla


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, run_jitted):
    arrays = build_inputs(case, seed=1)
    y, window = run_jitted(causal_conv1d_xla, *arrays)
    wanted, wanted_window = run_jitted(causal_conv1d_reference, *arrays)
    num_used = sum(case.counts)
    np.testing.assert_allclose(y[:num_used], wanted[:num_used], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(window, wanted_window)
    assert np.isfinite(np.asarray(y)).all()
