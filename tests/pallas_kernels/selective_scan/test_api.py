"""Tests of `selective_scan/api.py`: the checks of arguments."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.selective_scan.api import selective_scan

SHAPES = {
    "x": ((6, 2, 5), jnp.bfloat16),
    "dt": ((6, 2, 5), jnp.float32),
    "a": ((2, 8, 5), jnp.float32),
    "b": ((6, 2, 8), jnp.float32),
    "c": ((6, 2, 8), jnp.float32),
    "states": ((3, 2, 8, 5), jnp.float32),
    "query_start_loc": ((4,), jnp.int32),
}


def shapes_of_results(changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(lambda *arrays: selective_scan(*arrays, **options), *arrays)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_results_are_float32(implementation):
    out, states = shapes_of_results({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((6, 2, 5), jnp.float32)
    assert (states.shape, states.dtype) == ((3, 2, 8, 5), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt": ((6, 2), jnp.float32)}, r"dt has .* wanted \[6, 2, 5\]"),
        ({"a": ((2, 5, 8), jnp.float32)}, r"a has .* wanted \[2, state_size, 5\]"),
        ({"c": ((6, 2, 4), jnp.float32)}, r"c has .* wanted \[6, 2, 8\]"),
        ({"states": ((3, 2, 5, 8), jnp.float32)}, r"states has .* wanted \[num_reqs, 2, 8, 5\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc has .* wanted \[4\]"),
        ({"x": ((6, 2, 5), jnp.int32)}, "x has the wrong dtype"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(changes)


def test_one_token_each_needs_a_row_for_each_request():
    with pytest.raises(ValueError, match="got 6 tokens and 3 requests"):
        shapes_of_results({}, has_one_token_each=True)
