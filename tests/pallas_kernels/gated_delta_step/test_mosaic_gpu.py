"""Tests of `gated_delta_step/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.gated_delta_step.api import _BODIES, gated_delta_step
from pallas_kernels.gated_delta_step.cases import CASES, build_inputs
from pallas_kernels.gated_delta_step.reference import gated_delta_step_reference
from pallas_kernels.target import Target
from tests.pallas_kernels.state_steps import assert_steps_are_close

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
FITTING, UNFIT = CASES[:-1], CASES[-1]


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.gated_delta_step import mosaic_gpu

    return mosaic_gpu


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    inputs = build_inputs(case)
    assert mosaic_gpu.misfit(*inputs) is None
    got = run_simulated(mosaic_gpu.gated_delta_step_mosaic_gpu, *inputs)
    wanted = run_jitted(gated_delta_step_reference, *inputs)
    assert_steps_are_close(case, inputs[0], got, wanted)
    # Rows that write nothing have results too, which later layers read.
    assert np.isfinite(got[1]).all()


def test_lowers_for_cuda(mosaic_gpu, lower_for_cuda):
    text = lower_for_cuda(mosaic_gpu.gated_delta_step_mosaic_gpu, *build_inputs(FITTING[-1]))
    assert text.count("@mosaic_gpu") == 1


def test_what_does_not_fit_has_a_reason_and_runs_as_xla(mosaic_gpu):
    inputs = build_inputs(UNFIT)
    assert "multiple of 4 x 32, got 8 x 6" in mosaic_gpu.misfit(*inputs)
    assert preferred_body("gated_delta_step", _BODIES, H200, *inputs) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    text = lower_for_cuda(gated_delta_step, *build_inputs(FITTING[0]), target=H200)
    assert text.count("@mosaic_gpu") == 1
