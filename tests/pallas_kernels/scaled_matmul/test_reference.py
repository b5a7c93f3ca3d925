"""Tests of `scaled_matmul/reference.py` and `xla.py` against the definition in float64 NumPy."""

import functools

import pytest

from pallas_kernels.scaled_matmul.cases import CASES, build_inputs
from pallas_kernels.scaled_matmul.reference import scaled_matmul_reference
from pallas_kernels.scaled_matmul.xla import scaled_matmul_xla
from tests.pallas_kernels.scaled_matmul.products import assert_is_the_product
from tests.quick_compile import slow_unless_named

# Each format, each kind of scale and each dtype. The other cases differ in sizes of a GPU's tiles.
QUICK_CASES = (
    "int8",
    "int8_odd_widths",
    "int4",
    "int4_zeros",
    "e4m3",
    "e2m1",
    "int8_per_output_bfloat16",
    "int4_exponents_bfloat16",
    "e2m1_bfloat16",
    "int8_float16",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_rows_are_multiplied_with_the_matrix_that_the_numbers_stand_for(case, run_jitted):
    inputs = build_inputs(case)
    for body in (scaled_matmul_reference, scaled_matmul_xla):
        multiply = functools.partial(body, **inputs.options)
        assert_is_the_product(case, inputs, run_jitted(multiply, *inputs.arrays))
