"""Tests of `block_copy/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from pallas_kernels.block_copy.api import block_copy

SHAPES = {
    "pages": ((2, 5, 1024), jnp.float32),
    "source_block_ids": ((4,), jnp.int32),
    "target_block_ids": ((4,), jnp.int32),
}


def abstract_arguments(changes):
    return {name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()}


def shape_of_result(changes, implementation=None):
    call = lambda arguments: block_copy(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, abstract_arguments(changes))


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
@pytest.mark.parametrize("dims", [(2, 5, 7), (2, 5, 2, 2, 16, 32)], ids=str)
def test_every_implementation_returns_the_pages(dims, implementation):
    pages = shape_of_result({"pages": (dims, jnp.int8)}, implementation)
    assert (pages.shape, pages.dtype) == (dims, jnp.int8)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_nothing_to_do_is_no_error(implementation):
    changes = {"source_block_ids": ((0,), jnp.int32), "target_block_ids": ((0,), jnp.int32)}
    pages = shape_of_result(changes, implementation)
    assert (pages.shape, pages.dtype) == SHAPES["pages"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pages": ((2, 5), jnp.float32)},
            r"pages .* got \[2, 5\], wanted \[num_rows, num_blocks, words\]",
        ),
        ({"pages": ((2, 5, 0), jnp.float32)}, r"pages is empty: got \[2, 5, 0\]"),
        ({"source_block_ids": ((4, 1), jnp.int32)}, r"source_block_ids .* wanted \[num_copies\]"),
        ({"target_block_ids": ((3,), jnp.int32)}, r"target_block_ids .* got \[3\], wanted \[4\]"),
        ({"source_block_ids": ((4,), jnp.uint32)}, "source_block_ids .* got uint32, wanted int32"),
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
    jitted = jax.jit(block_copy, donate_argnames="pages")
    exported = jax.export.export(jitted, platforms=[platform])(**abstract_arguments({}))
    assert exported.platforms == (platform,)
