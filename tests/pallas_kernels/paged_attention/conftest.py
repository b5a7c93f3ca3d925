"""Fixtures shared by the tests of the paged attention bodies."""

import functools

import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.quick_compile import quick_jit


@functools.cache
def with_positional_options(body):
    """`body` with its keyword arguments that are arrays as one positional argument."""

    def call(traced_options, *arrays, **rules):
        return body(*arrays, **rules, **traced_options)

    return call


@pytest.fixture(scope="session")
def attend():
    """Runs one body on inputs from `build_inputs`: output and lse, as float32 NumPy.

    Inputs of the same rules and shapes share one program.
    """

    def run(inputs, body, **options):
        jitted = quick_jit(with_positional_options(body), **inputs.rules, **options)
        pair = jitted(inputs.traced_options, *inputs.arrays)
        return tuple(np.asarray(array).astype(np.float32) for array in pair)

    return run


@pytest.fixture(scope="session")
def attend_by_reference(attend):
    """The reference's output and lse on a case, computed once a test run."""
    return functools.cache(lambda case: attend(build_inputs(case), paged_attention_reference))
