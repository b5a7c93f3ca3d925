"""Tests of `gated_delta_rule/reference.py` against its definition in float64 NumPy."""

import numpy as np
import pytest

from pallas_kernels.gated_delta_rule.cases import CASES, build_inputs
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference


def by_definition(q, k, v, log_decay, beta, state):
    """One head of one request; matrices as in the paper."""
    out = []
    for token in range(len(q)):
        decay = np.exp(log_decay[token]) * np.ones(len(k[token]))
        erased = np.eye(len(decay)) - beta[token] * np.outer(k[token], k[token])
        state = erased @ (decay[:, None] * state) + beta[token] * np.outer(k[token], v[token])
        out.append(state.T @ q[token])
    return np.array(out), state


def compute_in_numpy(arrays):
    """Outputs of all tokens in use, and the states at the end of the requests."""
    *tokens, states = (np.asarray(array).astype(np.float64) for array in arrays[:6])
    starts = np.asarray(arrays[6])
    out = np.zeros((starts[-1], *tokens[2].shape[1:]))
    for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for head in range(states.shape[1] if end > start else 0):
            own = [array[start:end, head] for array in tokens]
            out[start:end, head], states[req, head] = by_definition(*own, states[req, head])
    return out, states


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case)
    out, states = run_jitted(gated_delta_rule_reference, *arrays)
    wanted, wanted_states = compute_in_numpy(arrays)
    np.testing.assert_allclose(states, wanted_states, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)


def test_a_repeated_key_replaces_its_value(run_jitted):
    key = np.array([[[1.0, 0.0]]] * 2, np.float32)
    values = np.array([[[3.0]], [[5.0]]], np.float32)
    zeros, ones = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    starts = np.array([0, 2], np.int32)
    state = np.zeros((1, 1, 2, 1), np.float32)
    arrays = (key, key, values, zeros, ones, state, starts)
    out, states = run_jitted(gated_delta_rule_reference, *arrays)
    np.testing.assert_array_equal(np.asarray(out).ravel(), [3, 5])
    np.testing.assert_array_equal(np.asarray(states).ravel(), [5, 0])
