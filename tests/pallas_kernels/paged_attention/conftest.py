"""Fixtures shared by the tests of the paged attention bodies."""

import functools

import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference


@pytest.fixture(scope="session")
def attend(run_jitted):
    """Runs one body on inputs from `build_inputs`, as float32 NumPy."""

    def run(inputs, body):
        def call(sinks, *arrays):
            return body(
                *arrays,
                scale=inputs.scale,
                sliding_window=inputs.sliding_window,
                soft_cap=inputs.soft_cap,
                sinks=sinks,
            )

        return np.asarray(run_jitted(call, inputs.sinks, *inputs.arrays)).astype(np.float32)

    return run


@pytest.fixture(scope="session")
def attend_by_reference(attend):
    """The reference's output on a case, computed once a test run."""
    return functools.cache(lambda case: attend(build_inputs(case), paged_attention_reference))
