"""Plain-JAX bodies of the ops that advance `PagedStates`, against one step in NumPy."""

import numpy as np
import pytest

from pallas_kernels.paged_states import PagedStates
from tests.pallas_kernels.state_steps import assert_is_step_of_rule, each_op, each_plain_case


@each_plain_case()
def test_plain_bodies_equal_the_rule_on_states_read_by_numpy(op, case, run_jitted):
    states, *tokens = op.build_inputs(case)
    for body in ("reference", "xla"):
        got = run_jitted(op.bodies[body], states, *tokens)
        assert_is_step_of_rule(case, states, got, op.rule_of(tokens))


@each_op()
def test_a_state_in_the_wrong_block_is_noticed(op, run_jitted):
    case = op.cases[1]
    states, *tokens = op.build_inputs(case)
    assert isinstance(states, PagedStates)
    pages, out = run_jitted(op.bodies["reference"], states, *tokens)
    wrong = pages.copy()
    first, other = np.asarray(states.write_blocks)[0, :2]
    wrong[1, first] = pages[1, other]
    with pytest.raises(AssertionError):
        assert_is_step_of_rule(case, states, (wrong, out), op.rule_of(tokens))
