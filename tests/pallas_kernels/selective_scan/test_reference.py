"""Tests of `selective_scan/reference.py` against its definition in float64 NumPy."""

import numpy as np
import pytest

from pallas_kernels.selective_scan.cases import CASES, build_inputs
from pallas_kernels.selective_scan.reference import selective_scan_reference


def by_definition(x, dt, a, b, c, state):
    """One channel of one request: every token is a sum over the tokens before it."""
    total = np.cumsum(dt)
    out = np.exp(total[:, None] * a) * c @ state
    for token in range(len(x)):
        for earlier in range(token + 1):
            decay = np.exp((total[token] - total[earlier]) * a)
            out[token] += (c[token] * decay * b[earlier]).sum() * dt[earlier] * x[earlier]
    kept = np.exp((total[-1] - total)[:, None] * a)
    return out, np.exp(total[-1] * a) * state + (kept * b * (dt * x)[:, None]).sum(axis=0)


def compute_in_numpy(case, arrays):
    """Outputs of all tokens in use, and the states at the end of the requests."""
    x, dt, a, b, c, states = (np.asarray(array).astype(np.float64) for array in arrays[:6])
    starts = np.asarray(arrays[6])
    out = np.zeros((starts[-1], *x.shape[1:]))
    for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if start == end:
            continue
        own = slice(start, end)
        for group, channel in np.ndindex(case.num_groups, case.width):
            out[own, group, channel], states[req, group, :, channel] = by_definition(
                x[own, group, channel],
                dt[own, group, channel],
                a[group, :, channel],
                b[own, group],
                c[own, group],
                states[req, group, :, channel],
            )
    return out, states


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case)
    out, states = run_jitted(selective_scan_reference, *arrays)
    wanted, wanted_states = compute_in_numpy(case, arrays)
    np.testing.assert_allclose(out[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states, wanted_states, rtol=1e-4, atol=1e-5)
    has_tokens = np.array(case.counts) > 0
    np.testing.assert_array_equal(states[~has_tokens], np.asarray(arrays[5])[~has_tokens])
