"""Tests of `ssd_step/xla.py` against the reference."""

import pytest

from pallas_kernels.ssd_step.cases import CASES, build_inputs
from pallas_kernels.ssd_step.reference import ssd_step_reference
from pallas_kernels.ssd_step.xla import ssd_step_xla
from tests.pallas_kernels.state_steps import assert_steps_are_close


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, run_jitted):
    inputs = build_inputs(case, seed=1)
    got = run_jitted(ssd_step_xla, *inputs)
    wanted = run_jitted(ssd_step_reference, *inputs)
    assert_steps_are_close(case, inputs[0], got, wanted)
