"""Tests of `block_gather/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from pallas_kernels.block_gather.api import block_gather

SHAPES = {
    "pages": ((2, 5, 1024), jnp.bfloat16),
    "block_ids": ((3,), jnp.int32),
}


def abstract_arguments(changes):
    return {name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()}


def shape_of_result(changes, implementation=None):
    call = lambda arguments: block_gather(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, abstract_arguments(changes))


@pytest.mark.parametrize("num_ids", [0, 1, 3])
@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_the_blocks_of_every_row(implementation, num_ids):
    ids = {"block_ids": ((num_ids,), jnp.int32)}
    for block_dims in ((7,), (2, 2, 16, 32)):
        changes = ids | {"pages": ((2, 5, *block_dims), jnp.int8)}
        values = shape_of_result(changes, implementation)
        assert (values.shape, values.dtype) == ((2, num_ids, *block_dims), jnp.int8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pages": ((2, 5), jnp.float32)},
            r"pages .* got \[2, 5\], wanted \[num_rows, num_blocks, words\]",
        ),
        ({"pages": ((2, 0, 8), jnp.float32)}, r"pages is empty: got \[2, 0, 8\]"),
        ({"block_ids": ((3, 1), jnp.int32)}, r"block_ids .* wanted \[num_ids\]"),
        ({"block_ids": ((3,), jnp.uint32)}, "block_ids .* got uint32, wanted int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result(changes)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="got 'cuda', wanted None or one of"):
        shape_of_result({}, "cuda")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_default_body_lowers_for_accelerators(platform):
    exported = jax.export.export(jax.jit(block_gather), platforms=[platform])(
        **abstract_arguments({})
    )
    assert exported.platforms == (platform,)
