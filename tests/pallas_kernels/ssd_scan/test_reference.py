"""Tests of `ssd_scan/reference.py` against its definition in float64 NumPy."""

import numpy as np
import pytest

from pallas_kernels.ssd_scan.cases import CASES, build_inputs
from pallas_kernels.ssd_scan.reference import ssd_scan_reference


def by_definition(x, b, c, log_decay, state):
    """One head of one request: every token is a sum over the tokens before it (equation 16)."""
    total = np.cumsum(log_decay)
    out = np.exp(total)[:, None] * (c @ state.T)
    for token in range(len(x)):
        for earlier in range(token + 1):
            weight = np.exp(total[token] - total[earlier]) * (c[token] @ b[earlier])
            out[token] += weight * x[earlier]
    kept = np.exp(total[-1] - total)
    return out, np.exp(total[-1]) * state + np.einsum("t,tp,tn->pn", kept, x, b)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case)
    out, states = run_jitted(ssd_scan_reference, *arrays)
    x, b, c, log_decay, before = (np.asarray(array).astype(np.float64) for array in arrays[:5])
    starts = np.asarray(arrays[5])
    for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if start == end:
            np.testing.assert_array_equal(states[req], arrays[4][req])
            continue
        for head in range(case.num_heads):
            group = head * case.num_groups // case.num_heads
            own = slice(start, end)
            wanted, state = by_definition(
                x[own, head], b[own, group], c[own, group], log_decay[own, head], before[req, head]
            )
            np.testing.assert_allclose(out[own, head], wanted, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(states[req, head], state, rtol=1e-4, atol=1e-5)
