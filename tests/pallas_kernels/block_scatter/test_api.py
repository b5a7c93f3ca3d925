"""Tests of `block_scatter/api.py`: checks, the choice of a body, and the round trip."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_gather.api import block_gather
from pallas_kernels.block_scatter.api import block_scatter
from tests import on_device

SHAPES = {
    "pages": ((2, 5, 16, 32), jnp.bfloat16),
    "values": ((2, 3, 16, 32), jnp.bfloat16),
    "block_ids": ((3,), jnp.int32),
}


def abstract_arguments(changes):
    return {name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()}


def shape_of_result(changes, implementation=None):
    call = lambda arguments: block_scatter(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, abstract_arguments(changes))


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_the_pages(implementation):
    for dims in ((7,), (2, 2, 16, 32)):
        changes = {"pages": ((2, 5, *dims), jnp.int8), "values": ((2, 3, *dims), jnp.int8)}
        pages = shape_of_result(changes, implementation)
        assert (pages.shape, pages.dtype) == changes["pages"]


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_nothing_to_do_is_no_error(implementation):
    changes = {"values": ((2, 0, 16, 32), jnp.bfloat16), "block_ids": ((0,), jnp.int32)}
    pages = shape_of_result(changes, implementation)
    assert (pages.shape, pages.dtype) == SHAPES["pages"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pages": ((2, 5), jnp.bfloat16)},
            r"pages .* got \[2, 5\], wanted \[num_rows, num_blocks, words\]",
        ),
        ({"pages": ((2, 5, 0, 32), jnp.bfloat16)}, r"pages is empty: got \[2, 5, 0, 32\]"),
        ({"values": ((2, 4, 16, 32), jnp.bfloat16)}, r"values .* got \[2, 4, 16, 32\]"),
        ({"values": ((2, 3, 512), jnp.bfloat16)}, r"values .* wanted \[2, 3, 16, 32\]"),
        ({"values": ((2, 3, 16, 32), jnp.float16)}, "values .* got float16, .* bfloat16"),
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
    jitted = jax.jit(block_scatter, donate_argnames="pages")
    exported = jax.export.export(jitted, platforms=[platform])(**abstract_arguments({}))
    assert exported.platforms == (platform,)


def any_bytes(rng, dims, dtype):
    """Any bit patterns but NaN: also infinities, negative zeros, subnormals.

    XLA:CPU of JAX 0.10.2 moves bfloat16 through float32, where one NaN becomes another.
    """
    dtype = jnp.dtype(dtype)
    bits = rng.integers(0, 256, (*dims[:-1], dims[-1] * dtype.itemsize), np.uint8)
    values = bits.view(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.where(np.isnan(values), dtype.type(0), values)


def bytes_of(array):
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int8", "float8_e4m3fn"])
def test_blocks_come_back_from_the_host_byte_by_byte(dtype):
    rng = np.random.default_rng(0)
    pages_np = any_bytes(rng, (2, 8, 2, 64), dtype)
    pages = on_device.array(pages_np)
    gather = jax.jit(block_gather)
    scatter = jax.jit(block_scatter, donate_argnums=0)

    out_ids = on_device.array([6, 1, 8, 3], jnp.int32)  # 8 is padding
    on_host = jax.device_get(gather(pages, out_ids))
    np.testing.assert_array_equal(bytes_of(on_host[:, 0]), bytes_of(pages_np[:, 6]))
    assert not bytes_of(on_host[:, 2]).any()

    # Back into other blocks, of which one was swapped out before.
    in_ids = on_device.array([2, 6, 9, 7], jnp.int32)
    pages = scatter(pages, jax.device_put(on_host), in_ids)
    expected = pages_np.copy()
    expected[:, [2, 6, 7]] = pages_np[:, [6, 1, 3]]
    np.testing.assert_array_equal(bytes_of(pages), bytes_of(expected))
