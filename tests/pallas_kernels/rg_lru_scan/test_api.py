"""Tests of `rg_lru_scan/api.py`, and of the bodies against the definition in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rg_lru_scan.api import rg_lru_scan
from pallas_kernels.rg_lru_scan.cases import CASES, RGLRUScanCase, build_inputs
from pallas_kernels.rg_lru_scan.reference import rg_lru_scan_reference
from pallas_kernels.rg_lru_scan.xla import rg_lru_scan_xla
from tests.pallas_kernels.cut_prompts import compute_parts


def by_definition(x, log_decay, state):
    """Every result is a sum over the tokens before it."""
    total = np.cumsum(log_decay, axis=0)
    between = total[:, None] - total[None]
    weights = np.where(np.tri(len(x), dtype=bool)[..., None], np.exp(np.minimum(between, 0)), 0)
    return np.exp(total) * state + (weights * x[None]).sum(axis=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("body", [rg_lru_scan_reference, rg_lru_scan_xla])
def test_bodies_equal_the_definition(case, body, run_jitted):
    arrays = build_inputs(case)
    x, log_decay, before = (np.asarray(array).astype(np.float64) for array in arrays[:3])
    starts = np.asarray(arrays[3])
    for has_one_token_each in {False, case.has_one_token_each}:
        out, states = run_jitted(body, *arrays, has_one_token_each=has_one_token_each)
        for req, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if start == end:
                continue
            own = slice(start, end)
            wanted = by_definition(x[own], log_decay[own], before[req])
            np.testing.assert_allclose(out[own], wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(states[req], wanted[-1], rtol=1e-5, atol=1e-5)


def test_cutting_a_prompt_anywhere_changes_nothing(run_jitted):
    case = RGLRUScanCase(name="prompt", counts=(21,))
    *tokens, states, starts = build_inputs(case)
    whole, last = run_jitted(rg_lru_scan_xla, *tokens, states, starts)

    def compute(x, log_decay, states, starts, positions):
        return run_jitted(rg_lru_scan_xla, x, log_decay, states, starts)

    parts, states = compute_parts(compute, tokens, states, np.arange(21), cuts=(5, 6, 19))
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(states, last)


SHAPES = {
    "x": ((6, 5), jnp.bfloat16),
    "log_decay": ((6, 5), jnp.float32),
    "states": ((3, 5), jnp.float32),
    "query_start_loc": ((4,), jnp.int32),
}


def shapes_of_results(changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(lambda *arrays: rg_lru_scan(*arrays, **options), *arrays)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_results_are_float32(implementation):
    out, states = shapes_of_results({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((6, 5), jnp.float32)
    assert (states.shape, states.dtype) == ((3, 5), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_decay": ((6, 2), jnp.float32)}, r"log_decay has .* wanted \[6, 5\]"),
        ({"states": ((3, 4), jnp.float32)}, r"states has .* wanted \[num_reqs, 5\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc has .* wanted \[4\]"),
        ({"x": ((6, 5), jnp.int32)}, "x has the wrong dtype"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(changes)


def test_one_token_each_needs_a_row_for_each_request():
    with pytest.raises(ValueError, match="got 6 tokens and 3 requests"):
        shapes_of_results({}, has_one_token_each=True)
