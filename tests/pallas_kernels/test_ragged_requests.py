"""Tests of `ragged_requests.py`: requests of tokens, and where ops that use it end their states."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.causal_conv1d import cases as conv_cases
from pallas_kernels.gated_delta_rule import cases as delta_cases
from pallas_kernels.ragged_requests import request_of_token
from pallas_kernels.rg_lru_scan import cases as lru_cases
from pallas_kernels.selective_scan import cases as selective_cases
from pallas_kernels.ssd_scan import cases as ssd_cases

# Name -> the module of cases, and the places of the arguments that are not one row per token.
OPS = {
    "causal_conv1d": (conv_cases, {1, 2, 3}),
    "gated_delta_rule": (delta_cases, {5, 6}),
    "rg_lru_scan": (lru_cases, {2, 3}),
    "selective_scan": (selective_cases, {2, 5, 6}),
    "ssd_scan": (ssd_cases, {4, 5}),
}


@pytest.mark.parametrize(
    ("name", "case_name", "implementation"),
    [
        *((name, "ragged", body) for name in OPS for body in ("reference", "xla")),
        ("gated_delta_rule", "chunks", "xla"),
        ("ssd_scan", "chunks", "xla"),
    ],
)
def test_states_are_those_before_the_end(name, case_name, implementation, run_jitted):
    module, fixed = OPS[name]
    case = next(case for case in module.CASES if case.name == case_name)
    arrays = [*map(np.asarray, module.build_inputs(case, seed=3))]
    starts = arrays[-1]
    # All tokens, none, and all but the last three, in the middle of a chunk.
    ends = np.maximum(starts[1:] - [0, 0, *[3] * (len(starts) - 3)], starts[:-1]).astype(np.int32)
    has_tokens = ends > starts[:-1]
    assert any(has_tokens & (ends < starts[1:]))
    positions = getattr(case, "positions", None)
    options = {} if positions is None else {"positions": np.asarray(positions)}
    op = functools.partial(getattr(pallas_kernels, name), implementation=implementation)

    def call(arrays, options):
        return op(*arrays, **options)

    def run(arrays, ends, **options):
        return run_jitted(call, arrays, options | {"state_ends": ends})

    # The same tokens without those after the ends, which become tokens of no request.
    kept = np.concatenate([np.arange(a, b) for a, b in zip(starts[:-1], ends, strict=True)])
    order = np.concatenate([kept, np.setdiff1d(np.arange(len(arrays[0])), kept)])
    cut = [x if place in fixed else x[order] for place, x in enumerate(arrays)]
    cut[-1] = np.concatenate([[0], np.cumsum(ends - starts[:-1])]).astype(np.int32)
    plain, _ = run(arrays, starts[1:], **options)
    out, states = run(arrays, ends, **options)
    _, wanted = run(cut, cut[-1][1:], **{key: value[order] for key, value in options.items()})
    used = slice(0, int(starts[-1]))
    np.testing.assert_allclose(out[used], plain[used], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states[has_tokens], wanted[has_tokens], rtol=1e-6, atol=1e-6)


def test_tokens_of_no_request_get_the_last():
    starts = jnp.array([0, 2, 2, 5], jnp.int32)
    np.testing.assert_array_equal(request_of_token(starts, 7), [0, 0, 2, 2, 2, 2, 2])
