"""Tests of `merge_attention_states/api.py`: the checks of arguments and the choice of a body."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.merge_attention_states.api import merge_attention_states

SHAPES = {
    "out_a": ((6, 4, 32), jnp.bfloat16),
    "lse_a": ((6, 4), jnp.float32),
    "out_b": ((6, 4, 32), jnp.bfloat16),
    "lse_b": ((6, 4), jnp.float32),
}


def shapes_of_results(changes, **options):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    return jax.eval_shape(
        lambda arguments: merge_attention_states(**arguments, **options), arguments
    )


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_results_have_the_shapes_of_the_states(implementation):
    out, lse = shapes_of_results({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((6, 4, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((6, 4), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_a": ((6, 4), jnp.float32)}, r"out_a .* wanted \[num_tokens, num_q_heads, v_head"),
        ({"out_b": ((6, 4, 16), jnp.float32)}, r"out_b .* got \[6, 4, 16\], wanted \[6, 4, 32\]"),
        ({"lse_a": ((4, 6), jnp.float32)}, r"lse_a .* got \[4, 6\], wanted \[6, 4\]"),
        ({"lse_b": ((6,), jnp.float32)}, r"lse_b .* got \[6\], wanted \[6, 4\]"),
        ({"lse_b": ((6, 4), jnp.bfloat16)}, "lse_b .* dtype: got bfloat16, wanted float32"),
        (
            {"out_b": ((6, 4, 32), jnp.int32)},
            "out_b .* dtype: got int32, wanted a float",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_results(changes)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"got 'triton', wanted None or one of .*'xla'"):
        shapes_of_results({}, implementation="triton")


def test_signature_names_no_backend():
    parameters = list(inspect.signature(merge_attention_states).parameters)
    assert parameters == [*SHAPES, "implementation", "target"]
