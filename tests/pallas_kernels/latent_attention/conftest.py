"""Fixtures shared by the tests of the `latent_attention` bodies."""

import functools

import numpy as np
import pytest

from pallas_kernels.latent_attention.cases import build_inputs
from pallas_kernels.latent_attention.reference import latent_attention_reference


@pytest.fixture(scope="session")
def attend(run_jitted):
    """Runs one body on inputs from `build_inputs`: output and lse, as float32 NumPy."""

    def run(inputs, body):
        pair = run_jitted(body, *inputs.arrays, **inputs.rules)
        return tuple(np.asarray(array).astype(np.float32) for array in pair)

    return run


@pytest.fixture(scope="session")
def attend_by_reference(attend):
    """The reference's output and lse on a case, computed once a test run."""
    return functools.cache(lambda case: attend(build_inputs(case), latent_attention_reference))
