"""Kernels that advance states by `state_tiles.py`, simulated and lowered: no GPU is needed."""

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.target import Target
from tests.pallas_kernels.state_steps import assert_steps_are_close, each_case, each_op

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def kernel_of(op):
    """The body, imported only where JAX is new enough."""
    return op.bodies["mosaic_gpu"].load()


@pytest.mark.parametrize(
    ("first_line", "num_lines", "wanted"), [(0, 64, 16), (8, 64, 8), (4, 64, 4), (0, 24, 24)]
)
def test_no_page_boundary_cuts_lines_that_are_loaded_together(first_line, num_lines, wanted):
    from pallas_kernels.state_tiles import StatePlan

    plan = StatePlan(
        num_blocks=2, num_lines=num_lines, line_size=32, lines_per_page=48, first_line=first_line
    )
    assert plan.lines_together == wanted


@each_case()
def test_a_kernel_equals_the_reference(op, case, run_simulated, run_jitted):
    inputs = op.build_inputs(case)
    assert op.bodies["mosaic_gpu"].misfit(*inputs) is None
    got = run_simulated(kernel_of(op), *inputs)
    wanted = run_jitted(op.bodies["reference"], *inputs)
    assert_steps_are_close(case, inputs[0], got, wanted)
    # Rows that write nothing have results too, which later layers read.
    assert np.isfinite(got[1]).all()


@each_op()
def test_a_kernel_lowers_for_cuda(op, lower_for_cuda):
    text = lower_for_cuda(kernel_of(op), *op.build_inputs(op.cases[-2]))
    assert text.count("@mosaic_gpu") == 1


@each_op()
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(op):
    inputs = op.build_inputs(op.cases[-1])
    assert op.misfit in op.bodies["mosaic_gpu"].misfit(*inputs)
    assert preferred_body(op.name, op.bodies, H200, *inputs) == "xla"


@each_op()
def test_a_gpu_runs_the_kernel_by_itself(op, lower_for_cuda):
    text = lower_for_cuda(op.op, *op.build_inputs(op.cases[0]), target=H200)
    assert text.count("@mosaic_gpu") == 1
