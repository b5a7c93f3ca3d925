"""Tests of `gated_delta_step/api.py`: the checks of arguments."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_step.api import gated_delta_step
from tests.pallas_kernels.state_steps import abstract_states

SHAPES = {
    "q": ((3, 2, 8), jnp.float32),
    "k": ((3, 2, 8), jnp.float32),
    "v": ((3, 2, 4), jnp.bfloat16),
    "log_decay": ((3, 2), jnp.float32),
    "beta": ((3, 2), jnp.float32),
}


def shapes_of_results(states, changes, **options):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    return jax.eval_shape(lambda *args: gated_delta_step(*args, **options), states, *arrays)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
@pytest.mark.parametrize("decay", [(3, 2), (3, 2, 8)])
def test_results_are_float32_and_pages_keep_their_dtype(implementation, decay):
    changes = {"log_decay": (decay, jnp.bfloat16)}
    states, out = shapes_of_results(abstract_states(), changes, implementation=implementation)
    assert (out.shape, out.dtype) == ((3, 2, 4), jnp.float32)
    assert (states.pages.shape, states.pages.dtype) == ((2, 9, 32), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": ((3, 2, 4), jnp.float32)}, r"k has .* wanted \[3, 2, 8\]"),
        ({"log_decay": ((3, 2, 4), jnp.float32)}, r"log_decay has .* wanted \[3, 2, 8\]"),
        ({"beta": ((3, 2), jnp.int32)}, "beta has the wrong dtype"),
        ({"v": ((3, 2, 9), jnp.float32)}, "4 pages of 16 numbers, and 0 numbers before the state"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(abstract_states(), changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"read_blocks": jax.ShapeDtypeStruct((2, 4), jnp.int32)},
            r"wanted \[3, pages_per_state\]",
        ),
        ({"write_blocks": jax.ShapeDtypeStruct((3, 5), jnp.int32)}, r"wanted \[3, 4\]"),
        ({"write_blocks": jax.ShapeDtypeStruct((3, 4), jnp.int16)}, "wanted int32"),
        ({"starts_from_zero": jax.ShapeDtypeStruct((3,), jnp.int32)}, "got int32, wanted bool"),
        ({"pages": jax.ShapeDtypeStruct((2, 9, 2, 16), jnp.bfloat16)}, "pages has the wrong shape"),
        ({"dtype": "int8"}, "got int8, wanted a float"),
        ({"first_number": 1}, "1 numbers before the state, which are only allowed in a single"),
    ],
)
def test_states_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(replace(abstract_states(), **changes), {})
