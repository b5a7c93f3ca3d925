"""Tests of `ssd_step/reference.py` against `ssd_scan` on states read by NumPy."""

import jax.numpy as jnp
import pytest

from pallas_kernels.ssd_scan.reference import ssd_scan_reference
from pallas_kernels.ssd_step.cases import CASES, build_inputs
from pallas_kernels.ssd_step.reference import ssd_step_reference
from tests.pallas_kernels.state_steps import assert_is_step_of_rule


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_rule(case, run_jitted):
    states, *tokens = build_inputs(case)
    got = run_jitted(ssd_step_reference, states, *tokens)

    def rule(before_np):
        starts = jnp.arange(len(case.rows) + 1, dtype=jnp.int32)
        return run_jitted(ssd_scan_reference, *tokens, before_np, starts)

    assert_is_step_of_rule(case, states, got, rule)
