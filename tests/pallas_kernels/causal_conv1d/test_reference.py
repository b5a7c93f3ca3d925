"""Tests of `causal_conv1d/reference.py` against NumPy's convolution of whole sequences."""

import numpy as np
import pytest

from pallas_kernels.causal_conv1d.cases import CASES, build_inputs
from pallas_kernels.causal_conv1d.reference import causal_conv1d_reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_a_convolution_of_window_and_inputs(case, run_jitted):
    arrays = build_inputs(case)
    y, window = run_jitted(causal_conv1d_reference, *arrays)
    x, before, weight = (np.asarray(array).astype(np.float64) for array in arrays[:3])
    starts = np.asarray(arrays[3])
    for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        inputs = np.concatenate([before[req], x[start:end]])
        np.testing.assert_allclose(window[req], inputs[end - start :], rtol=1e-6)
        for channel in range(case.num_channels):
            if end > start:
                # NumPy's convolution turns the kernel around.
                wanted = np.convolve(inputs[:, channel], weight[::-1, channel], mode="valid")
                np.testing.assert_allclose(y[start:end, channel], wanted, rtol=1e-5, atol=1e-5)
