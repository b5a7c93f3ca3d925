"""Tests of `grouped_matmul/reference.py` against its definition in float64 NumPy."""

import functools

import pytest

from pallas_kernels.grouped_matmul.cases import build_inputs
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from tests.pallas_kernels.grouped_matmul.products import MARKED_CASES, assert_is_the_product


@pytest.mark.parametrize("case", MARKED_CASES)
def test_rows_are_multiplied_with_the_matrix_of_their_group(case, run_jitted):
    inputs = build_inputs(case)
    multiply = functools.partial(grouped_matmul_reference, **inputs.options)
    assert_is_the_product(case, inputs, run_jitted(multiply, *inputs.arrays))
