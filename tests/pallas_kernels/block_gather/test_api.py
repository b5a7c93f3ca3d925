"""Tests of `block_gather/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from pallas_kernels.block_gather.api import block_gather

SHAPES = {
    "k_cache": ((2, 5, 2, 16, 32), jnp.bfloat16),
    "v_cache": ((2, 5, 2, 16, 8), jnp.int8),
    "block_ids": ((3,), jnp.int32),
}


def abstract_arguments(changes):
    return {name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()}


def shapes_of_result(changes, implementation=None):
    call = lambda arguments: block_gather(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, abstract_arguments(changes))


@pytest.mark.parametrize("num_ids", [0, 1, 3])
@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_the_blocks_of_every_row(implementation, num_ids):
    k_blocks, v_blocks = shapes_of_result({"block_ids": ((num_ids,), jnp.int32)}, implementation)
    assert (k_blocks.shape, k_blocks.dtype) == ((2, num_ids, 2, 16, 32), jnp.bfloat16)
    assert (v_blocks.shape, v_blocks.dtype) == ((2, num_ids, 2, 16, 8), jnp.int8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_cache": ((5, 2, 16, 32), jnp.float32)}, r"k_cache .* got \[5, 2, 16, 32\]"),
        ({"v_cache": ((2, 6, 2, 16, 8), jnp.float32)}, r"v_cache .* got \[2, 6, 2, 16, 8\]"),
        ({"block_ids": ((3, 1), jnp.int32)}, r"block_ids .* wanted \[num_ids\]"),
        ({"block_ids": ((3,), jnp.uint32)}, "block_ids .* got uint32, wanted int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_result(changes)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="got 'cuda', wanted None or one of"):
        shapes_of_result({}, "cuda")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_default_body_lowers_for_accelerators(platform):
    exported = jax.export.export(jax.jit(block_gather), platforms=[platform])(
        **abstract_arguments({})
    )
    assert exported.platforms == (platform,)
