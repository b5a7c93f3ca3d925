"""Tests of `ssd_scan/xla.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.ssd_scan.cases import CASES, build_inputs
from pallas_kernels.ssd_scan.reference import ssd_scan_reference
from pallas_kernels.ssd_scan.xla import ssd_scan_xla


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, run_jitted):
    arrays = build_inputs(case, seed=1)
    wanted, wanted_states = run_jitted(ssd_scan_reference, *arrays)
    num_used, has_tokens = sum(case.counts), np.array(case.counts) > 0
    for has_one_token_each in {False, case.has_one_token_each}:
        out, states = run_jitted(ssd_scan_xla, *arrays, has_one_token_each=has_one_token_each)
        np.testing.assert_allclose(out[:num_used], wanted[:num_used], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            states[has_tokens], wanted_states[has_tokens], rtol=1e-4, atol=1e-5
        )
