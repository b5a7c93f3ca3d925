"""Tests of `ssd_scan/reference.py` against its definition in float64 NumPy."""

import numpy as np
import pytest

from pallas_kernels.ssd_scan.cases import CASES, build_inputs
from pallas_kernels.ssd_scan.reference import ssd_scan_reference


def by_definition(x, b, c, log_decay, state):
    """One head of one request: every token is a sum over the tokens before it (equation 16)."""
    total = np.cumsum(log_decay)
    decay = np.exp(np.minimum(total[:, None] - total, 0))
    out = np.exp(total)[:, None] * (c @ state.T) + np.tril(decay * (c @ b.T)) @ x
    kept = np.exp(total[-1] - total)
    return out, np.exp(total[-1]) * state + np.einsum("t,tp,tn->pn", kept, x, b)


def compute_in_numpy(case, arrays):
    """Outputs of all tokens in use, and the states at the end of the requests."""
    x, b, c, log_decay, states = (np.asarray(array).astype(np.float64) for array in arrays[:5])
    starts = np.asarray(arrays[5])
    out = np.zeros((starts[-1], *x.shape[1:]))
    for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        own = slice(start, end)
        for head in range(case.num_heads if end > start else 0):
            group = head * case.num_groups // case.num_heads
            out[own, head], states[req, head] = by_definition(
                x[own, head], b[own, group], c[own, group], log_decay[own, head], states[req, head]
            )
    return out, states


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case)
    out, states = run_jitted(ssd_scan_reference, *arrays)
    wanted, wanted_states = compute_in_numpy(case, arrays)
    np.testing.assert_allclose(out[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states, wanted_states, rtol=1e-4, atol=1e-5)
    has_tokens = np.array(case.counts) > 0
    np.testing.assert_array_equal(states[~has_tokens], np.asarray(arrays[4])[~has_tokens])
