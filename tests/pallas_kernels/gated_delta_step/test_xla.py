"""Tests of `gated_delta_step/xla.py` against the reference."""

import pytest

from pallas_kernels.gated_delta_step.cases import CASES, build_inputs
from pallas_kernels.gated_delta_step.reference import gated_delta_step_reference
from pallas_kernels.gated_delta_step.xla import gated_delta_step_xla
from tests.pallas_kernels.state_steps import assert_steps_are_close


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, run_jitted):
    inputs = build_inputs(case, seed=1)
    got = run_jitted(gated_delta_step_xla, *inputs)
    wanted = run_jitted(gated_delta_step_reference, *inputs)
    assert_steps_are_close(case, inputs[0], got, wanted)
