"""Tests of `gated_delta_rule/xla.py` against its definition."""

import functools

import numpy as np
import pytest

from pallas_kernels.gated_delta_rule.cases import CASES, GatedDeltaRuleCase, build_inputs
from pallas_kernels.gated_delta_rule.xla import gated_delta_rule_xla
from tests.pallas_kernels.cut_prompts import compute_parts
from tests.pallas_kernels.gated_delta_rule.test_reference import compute_in_numpy


def in_chunks(*arrays):
    """The body with `positions` as its last array."""
    *arrays, positions = arrays
    return gated_delta_rule_xla(*arrays, positions=positions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case, seed=1)
    wanted, wanted_states = compute_in_numpy(arrays)
    num_used, has_tokens = sum(case.counts), np.array(case.counts) > 0
    for has_one_token_each in {False, case.has_one_token_each}:
        if case.positions is not None:
            out, states = run_jitted(in_chunks, *arrays, case.positions)
        else:
            out, states = run_jitted(
                gated_delta_rule_xla, *arrays, has_one_token_each=has_one_token_each
            )
        np.testing.assert_allclose(out[:num_used], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            states[has_tokens], wanted_states[has_tokens], rtol=1e-4, atol=1e-5
        )


def test_cutting_a_prompt_changes_nothing(run_jitted):
    case = next(case for case in CASES if case.name == "ragged")
    *tokens, states, starts = map(np.asarray, build_inputs(case))
    whole, last = run_jitted(gated_delta_rule_xla, *tokens, states, starts)
    cut = 6  # within the third request
    first_starts, rest_starts = np.minimum(starts, cut), np.maximum(starts, cut) - cut
    first, states = run_jitted(
        gated_delta_rule_xla, *(x[:cut] for x in tokens), states, first_starts
    )
    rest, states = run_jitted(gated_delta_rule_xla, *(x[cut:] for x in tokens), states, rest_starts)
    num_used = sum(case.counts)
    np.testing.assert_array_equal(np.concatenate([first, rest])[:num_used], whole[:num_used])
    np.testing.assert_array_equal(states, last)


@pytest.mark.parametrize("has_decay_per_row", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cutting_a_prompt_between_chunks_changes_nothing(has_decay_per_row, run_jitted):
    case = GatedDeltaRuleCase(
        name="prompt",
        counts=(236,),
        first_positions=(10,),
        has_decay_per_row=has_decay_per_row,
    )
    *tokens, states, starts = build_inputs(case)
    whole, last = run_jitted(in_chunks, *tokens, states, starts, case.positions)
    compute = functools.partial(run_jitted, in_chunks)
    # The positions 64 and 192; the last part has as many tokens as the first.
    parts, states = compute_parts(compute, tokens, states, case.positions, cuts=(54, 182))
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(states, last)
