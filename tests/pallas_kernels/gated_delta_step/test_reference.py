"""Tests of `gated_delta_step/reference.py` against `gated_delta_rule` on states read by NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_delta_step.cases import CASES, build_inputs
from pallas_kernels.gated_delta_step.reference import gated_delta_step_reference
from tests.pallas_kernels.state_steps import assert_is_step_of_rule


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_rule(case, run_jitted):
    states, *tokens = build_inputs(case)
    got = run_jitted(gated_delta_step_reference, states, *tokens)

    def rule(before_np):
        starts = jnp.arange(len(case.rows) + 1, dtype=jnp.int32)
        return run_jitted(gated_delta_rule_reference, *tokens, before_np, starts)

    assert_is_step_of_rule(case, states, got, rule)


def test_a_state_in_the_wrong_block_is_noticed(run_jitted):
    case = CASES[1]
    states, *tokens = build_inputs(case)
    pages, out = run_jitted(gated_delta_step_reference, states, *tokens)
    wrong = pages.copy()
    first, other = np.asarray(states.write_blocks)[0, :2]
    wrong[1, first] = pages[1, other]

    def rule(before_np):
        starts = jnp.arange(len(case.rows) + 1, dtype=jnp.int32)
        return run_jitted(gated_delta_rule_reference, *tokens, before_np, starts)

    with pytest.raises(AssertionError):
        assert_is_step_of_rule(case, states, (wrong, out), rule)
