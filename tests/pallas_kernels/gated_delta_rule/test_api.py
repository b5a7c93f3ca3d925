"""Tests of `gated_delta_rule/api.py`: the checks of arguments."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule.api import gated_delta_rule

SHAPES = {
    "q": ((6, 2, 8), jnp.float32),
    "k": ((6, 2, 8), jnp.float32),
    "v": ((6, 2, 4), jnp.bfloat16),
    "log_decay": ((6, 2), jnp.float32),
    "beta": ((6, 2), jnp.float32),
    "states": ((3, 2, 8, 4), jnp.float32),
    "query_start_loc": ((4,), jnp.int32),
}


def shapes_of_results(changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(lambda *arrays: gated_delta_rule(*arrays, **options), *arrays)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
@pytest.mark.parametrize("decay", [(6, 2), (6, 2, 8)])
def test_results_are_float32(implementation, decay):
    changes = {"log_decay": (decay, jnp.bfloat16)}
    out, states = shapes_of_results(changes, implementation=implementation)
    assert (out.shape, out.dtype) == ((6, 2, 4), jnp.float32)
    assert (states.shape, states.dtype) == ((3, 2, 8, 4), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": ((6, 2, 4), jnp.float32)}, r"k has .* wanted \[6, 2, 8\]"),
        ({"log_decay": ((6, 2, 4), jnp.float32)}, r"log_decay has .* wanted \[6, 2, 8\]"),
        ({"states": ((3, 2, 4, 8), jnp.float32)}, r"states has .* wanted \[num_reqs, 2, 8, 4\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc has .* wanted \[4\]"),
        ({"beta": ((6, 2), jnp.int32)}, "beta has the wrong dtype"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(changes)


def test_one_token_each_needs_a_row_for_each_request():
    with pytest.raises(ValueError, match="got 6 tokens and 3 requests"):
        shapes_of_results({}, has_one_token_each=True)
