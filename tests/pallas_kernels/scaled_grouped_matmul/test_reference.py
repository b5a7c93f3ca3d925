"""Tests of `scaled_grouped_matmul/reference.py` and `xla.py` against float64 NumPy."""

import functools

import pytest

from pallas_kernels.scaled_grouped_matmul.cases import CASES, build_inputs
from pallas_kernels.scaled_grouped_matmul.reference import scaled_grouped_matmul_reference
from pallas_kernels.scaled_grouped_matmul.xla import scaled_grouped_matmul_xla
from tests.pallas_kernels.grouped_matmul.products import assert_is_the_product


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_multiplied_with_the_matrix_of_their_expert(case, run_jitted):
    inputs = build_inputs(case)
    for body in (scaled_grouped_matmul_reference, scaled_grouped_matmul_xla):
        multiply = functools.partial(body, **inputs.options)
        assert_is_the_product(case, inputs, run_jitted(multiply, *inputs.arrays))
