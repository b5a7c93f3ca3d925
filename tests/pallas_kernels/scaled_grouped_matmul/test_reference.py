"""Tests of `scaled_grouped_matmul/reference.py` and `xla.py` against float64 NumPy."""

import functools

import pytest

from pallas_kernels.scaled_grouped_matmul.cases import CASES, build_inputs
from pallas_kernels.scaled_grouped_matmul.reference import scaled_grouped_matmul_reference
from pallas_kernels.scaled_grouped_matmul.xla import scaled_grouped_matmul_xla
from tests.pallas_kernels.grouped_matmul.products import assert_is_the_product
from tests.quick_compile import slow_unless_named

# Each format and each kind of scale. The other cases differ in sizes of a GPU's tiles.
QUICK_CASES = (
    "int8",
    "e2m1",
    "int4_tiles_of_8_bfloat16",
    "int4_zeros_bfloat16",
    "e4m3_tiles_of_128_bfloat16",
    "no_rows_bfloat16",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_rows_are_multiplied_with_the_matrix_of_their_expert(case, run_jitted):
    inputs = build_inputs(case)
    for body in (scaled_grouped_matmul_reference, scaled_grouped_matmul_xla):
        multiply = functools.partial(body, **inputs.options)
        assert_is_the_product(case, inputs, run_jitted(multiply, *inputs.arrays))
