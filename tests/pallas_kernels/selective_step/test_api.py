"""Tests of `selective_step/api.py`: the checks of arguments."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.selective_step.api import selective_step
from tests.pallas_kernels.state_steps import abstract_states

SHAPES = {
    "x": ((3, 2, 8), jnp.float32),
    "dt": ((3, 2, 8), jnp.float32),
    "a": ((2, 4, 8), jnp.float32),
    "b": ((3, 2, 4), jnp.bfloat16),
    "c": ((3, 2, 4), jnp.float32),
}


def shapes_of_results(changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(
        lambda *args: selective_step(*args, **options), abstract_states(), *arrays
    )


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_results_are_float32_and_pages_keep_their_dtype(implementation):
    states, out = shapes_of_results({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((3, 2, 8), jnp.float32)
    assert (states.pages.shape, states.pages.dtype) == ((2, 9, 32), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt": ((3, 2, 4), jnp.float32)}, r"dt has .* wanted \[3, 2, 8\]"),
        ({"a": ((2, 8, 4), jnp.float32)}, r"a has .* wanted \[2, state_size, 8\]"),
        ({"b": ((3, 2, 8), jnp.float32)}, r"b has .* wanted \[3, 2, 4\]"),
        ({"c": ((3, 1, 4), jnp.float32)}, r"c has .* wanted \[3, 2, 4\]"),
        ({"x": ((3, 2, 8), jnp.int32)}, "x has the wrong dtype"),
        (
            {"a": ((2, 5, 8), jnp.float32), "b": ((3, 2, 5), jnp.float32)}
            | {"c": ((3, 2, 5), jnp.float32)},
            "4 pages of 16 numbers, and 0 numbers before the state",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(changes)
