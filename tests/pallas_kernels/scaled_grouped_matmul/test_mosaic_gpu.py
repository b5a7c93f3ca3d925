"""Tests of `scaled_grouped_matmul/mosaic_gpu.py`, simulated: no GPU is needed."""

import functools

import jax
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.scaled_grouped_matmul.cases import CASES, build_inputs
from tests.pallas_kernels.grouped_matmul.products import assert_is_the_product

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dtype == "bfloat16"], ids=lambda case: case.name
)
def test_kernel_computes_the_product(case, run_simulated):
    from pallas_kernels.scaled_grouped_matmul import mosaic_gpu

    inputs = build_inputs(case)
    assert mosaic_gpu.misfit(*inputs.arrays, **inputs.options) is None
    out = run_simulated(
        functools.partial(mosaic_gpu.scaled_grouped_matmul_mosaic_gpu, **inputs.options),
        *inputs.arrays,
    )
    assert_is_the_product(case, inputs, out)
