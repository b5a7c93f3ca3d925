"""Tests of `ssd_scan/xla.py` against its definition."""

import functools

import numpy as np
import pytest

from pallas_kernels.ssd_scan.cases import CASES, SSDScanCase, build_inputs
from pallas_kernels.ssd_scan.xla import ssd_scan_xla
from tests.pallas_kernels.cut_prompts import compute_parts
from tests.pallas_kernels.ssd_scan.test_reference import compute_in_numpy


def in_chunks(*arrays):
    """The body with `positions` as its last array."""
    *arrays, positions = arrays
    return ssd_scan_xla(*arrays, positions=positions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case, seed=1)
    wanted, wanted_states = compute_in_numpy(case, arrays)
    num_used, has_tokens = sum(case.counts), np.array(case.counts) > 0
    for has_one_token_each in {False, case.has_one_token_each}:
        if case.positions is not None:
            out, states = run_jitted(in_chunks, *arrays, case.positions)
        else:
            out, states = run_jitted(ssd_scan_xla, *arrays, has_one_token_each=has_one_token_each)
        np.testing.assert_allclose(out[:num_used], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            states[has_tokens], wanted_states[has_tokens], rtol=1e-4, atol=1e-5
        )


def test_cutting_a_prompt_between_chunks_changes_nothing(run_jitted):
    case = SSDScanCase(name="prompt", counts=(236,), first_positions=(10,))
    *tokens, states, starts = build_inputs(case)
    whole, last = run_jitted(in_chunks, *tokens, states, starts, case.positions)
    compute = functools.partial(run_jitted, in_chunks)
    # The positions 64 and 192; the last part has as many tokens as the first.
    parts, states = compute_parts(compute, tokens, states, case.positions, cuts=(54, 182))
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(states, last)
