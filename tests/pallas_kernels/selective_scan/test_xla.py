"""Tests of `selective_scan/xla.py` against its definition."""

import numpy as np
import pytest

from pallas_kernels.selective_scan.cases import CASES, SelectiveScanCase, build_inputs
from pallas_kernels.selective_scan.xla import selective_scan_xla
from tests.pallas_kernels.cut_prompts import compute_parts
from tests.pallas_kernels.selective_scan.test_reference import compute_in_numpy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case, seed=1)
    wanted, wanted_states = compute_in_numpy(case, arrays)
    num_used, has_tokens = sum(case.counts), np.array(case.counts) > 0
    for has_one_token_each in {False, case.has_one_token_each}:
        out, states = run_jitted(selective_scan_xla, *arrays, has_one_token_each=has_one_token_each)
        np.testing.assert_allclose(out[:num_used], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            states[has_tokens], wanted_states[has_tokens], rtol=1e-5, atol=1e-5
        )


def test_cutting_a_prompt_anywhere_changes_nothing(run_jitted):
    case = SelectiveScanCase(name="prompt", counts=(21,))
    x, dt, a, b, c, states, starts = build_inputs(case)
    whole, last = run_jitted(selective_scan_xla, x, dt, a, b, c, states, starts)

    def compute(x, dt, b, c, states, starts, positions):
        return run_jitted(selective_scan_xla, x, dt, a, b, c, states, starts)

    parts, states = compute_parts(compute, (x, dt, b, c), states, np.arange(21), cuts=(10, 11))
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(states, last)
