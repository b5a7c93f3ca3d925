"""Tests of `kv_scatter/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_scatter.api import kv_scatter

SHAPES = {
    "k_cache": ((2, 5, 2, 16, 32), jnp.float32),
    "v_cache": ((2, 5, 2, 16, 8), jnp.float32),
    "k": ((6, 2, 32), jnp.float32),
    "v": ((6, 2, 8), jnp.float32),
    "slots": ((6,), jnp.int32),
    "row": ((), jnp.int32),
}


def shapes_of_result(changes, implementation=None):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    call = lambda arguments: kv_scatter(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla", "pallas_interpret"])
def test_every_implementation_returns_both_caches(implementation):
    k_cache, v_cache = shapes_of_result({}, implementation)
    assert (k_cache.shape, k_cache.dtype) == SHAPES["k_cache"]
    assert (v_cache.shape, v_cache.dtype) == SHAPES["v_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_cache": ((5, 2, 16, 32), jnp.float32)}, r"k_cache .* got \[5, 2, 16, 32\]"),
        ({"v_cache": ((2, 6, 2, 16, 8), jnp.float32)}, r"v_cache .* got \[2, 6, 2, 16, 8\]"),
        ({"k": ((6, 4, 32), jnp.float32)}, r"k has .* got \[6, 4, 32\], wanted \[6, 2, 32\]"),
        ({"v": ((6, 2, 32), jnp.float32)}, r"v has .* got \[6, 2, 32\], wanted \[6, 2, 8\]"),
        ({"k": ((6, 2, 32), jnp.int32)}, "k has the wrong dtype: got int32, wanted a float"),
        ({"slots": ((7,), jnp.int32)}, r"k has .* wanted \[7, 2, 32\]"),
        ({"slots": ((6, 1), jnp.int32)}, r"slots .* got \[6, 1\], wanted \[num_tokens\]"),
        ({"slots": ((6,), jnp.uint32)}, "slots has the wrong dtype: got uint32, wanted int32"),
        ({"row": ((2,), jnp.int32)}, r"row must be one integer: got int32\[2\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_result(changes)


def test_a_static_row_outside_the_cache_is_refused():
    arguments = {name: jnp.zeros(*shape) for name, shape in SHAPES.items()} | {"row": 2}
    with pytest.raises(ValueError, match=r"row is out of range: got 2, wanted \[0, 2\)"):
        kv_scatter(**arguments)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="got 'cuda', wanted None or one of"):
        shapes_of_result({}, "cuda")
