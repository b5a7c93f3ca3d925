"""Tests of `merge_attention_states/reference.py` against its definition in float64 NumPy."""

import numpy as np
import pytest

from pallas_kernels.merge_attention_states.cases import CASES, build_inputs
from pallas_kernels.merge_attention_states.reference import merge_attention_states_reference

TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}


def merge_by_definition(out_a, lse_a, out_b, lse_b):
    """One token and head at a time: the sums over keys that the two states stand for, added."""
    out = np.zeros(out_a.shape)
    lse = np.full(lse_a.shape, -np.inf)
    for at in np.ndindex(*lse_a.shape):
        states = [(o[at], s[at]) for o, s in ((out_a, lse_a), (out_b, lse_b)) if np.isfinite(s[at])]
        if not states:
            continue
        # Relative to the larger one: exp(10,000) is not a float64.
        largest = max(s for _, s in states)
        denominators = [np.exp(s - largest) for _, s in states]
        sums = [d * o for d, (o, _) in zip(denominators, states, strict=True)]
        out[at] = sum(sums) / sum(denominators)
        lse[at] = largest + np.log(sum(denominators))
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_sums_that_the_states_stand_for(case, run_jitted):
    inputs = build_inputs(case)
    out, lse = run_jitted(merge_attention_states_reference, *inputs.arrays)
    expected_out, expected_lse = merge_by_definition(
        *(np.asarray(array).astype(np.float64) for array in inputs.arrays)
    )
    assert out.dtype == case.dtype
    tolerance = TOLERANCES[case.dtype]
    out = np.asarray(out).astype(np.float64)
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6, rtol=2e-6)


def test_two_states_by_hand(run_jitted):
    # Denominators 1 and 3, outputs 4 and 8: (1 * 4 + 3 * 8) / 4 = 7.
    states = (np.full((1, 1, 1), 4.0), np.zeros((1, 1)), np.full((1, 1, 1), 8.0))
    lse_b = np.full((1, 1), np.log(3.0))
    arrays = (array.astype(np.float32) for array in (*states, lse_b))
    out, lse = run_jitted(merge_attention_states_reference, *arrays)
    np.testing.assert_allclose(out, [[[7.0]]], rtol=1e-6)
    np.testing.assert_allclose(lse, [[np.log(4.0)]], rtol=1e-6)
