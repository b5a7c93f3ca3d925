"""Tests of `ssd_step/api.py`: the checks of arguments."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ssd_step.api import ssd_step
from tests.pallas_kernels.state_steps import abstract_states

SHAPES = {
    "x": ((3, 2, 8), jnp.float32),
    "b": ((3, 1, 4), jnp.bfloat16),
    "c": ((3, 1, 4), jnp.float32),
    "log_decay": ((3, 2), jnp.float32),
}


def shapes_of_results(states, changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(lambda *args: ssd_step(*args, **options), states, *arrays)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_results_are_float32_and_pages_keep_their_dtype(implementation):
    states, out = shapes_of_results(abstract_states(), {}, implementation=implementation)
    assert (out.shape, out.dtype) == ((3, 2, 8), jnp.float32)
    assert (states.pages.shape, states.pages.dtype) == ((2, 9, 32), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"c": ((3, 2, 4), jnp.float32)}, r"c has .* wanted \[3, 1, 4\]"),
        ({"log_decay": ((3, 8), jnp.float32)}, r"log_decay has .* wanted \[3, 2\]"),
        ({"x": ((3, 2, 8), jnp.int32)}, "x has the wrong dtype"),
        ({"x": ((3, 2, 9), jnp.float32)}, "4 pages of 16 numbers, and 0 numbers before the state"),
        (
            {"b": ((3, 3, 4), jnp.float32), "c": ((3, 3, 4), jnp.float32)},
            "3 groups must divide the heads of x, got 2",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(abstract_states(), changes)
