"""Fixtures shared by the tests of the paged attention bodies."""

import functools

import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference


@pytest.fixture(scope="session")
def attend(run_jitted):
    """Runs one body on inputs from `build_inputs`: output and lse, as float32 NumPy."""

    def run(inputs, body, **options):
        def call(traced_options, *arrays):
            return body(*arrays, **inputs.rules, **traced_options, **options)

        pair = run_jitted(call, inputs.traced_options, *inputs.arrays)
        return tuple(np.asarray(array).astype(np.float32) for array in pair)

    return run


@pytest.fixture(scope="session")
def attend_by_reference(attend):
    """The reference's output and lse on a case, computed once a test run."""
    return functools.cache(lambda case: attend(build_inputs(case), paged_attention_reference))
