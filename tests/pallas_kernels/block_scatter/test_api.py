"""Tests of `block_scatter/api.py`: checks, the choice of a body, and the round trip."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_gather.api import block_gather
from pallas_kernels.block_scatter.api import block_scatter

SHAPES = {
    "k_cache": ((2, 5, 2, 16, 32), jnp.bfloat16),
    "v_cache": ((2, 5, 2, 16, 8), jnp.int8),
    "k_blocks": ((2, 3, 2, 16, 32), jnp.bfloat16),
    "v_blocks": ((2, 3, 2, 16, 8), jnp.int8),
    "block_ids": ((3,), jnp.int32),
}


def abstract_arguments(changes):
    return {name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()}


def shapes_of_result(changes, implementation=None):
    call = lambda arguments: block_scatter(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, abstract_arguments(changes))


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_both_caches(implementation):
    k_cache, v_cache = shapes_of_result({}, implementation)
    assert (k_cache.shape, k_cache.dtype) == SHAPES["k_cache"]
    assert (v_cache.shape, v_cache.dtype) == SHAPES["v_cache"]


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_nothing_to_do_is_no_error(implementation):
    changes = {
        "k_blocks": ((2, 0, 2, 16, 32), jnp.bfloat16),
        "v_blocks": ((2, 0, 2, 16, 8), jnp.int8),
        "block_ids": ((0,), jnp.int32),
    }
    k_cache, v_cache = shapes_of_result(changes, implementation)
    assert (k_cache.shape, k_cache.dtype) == SHAPES["k_cache"]
    assert (v_cache.shape, v_cache.dtype) == SHAPES["v_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_cache": ((5, 2, 16, 32), jnp.float32)}, r"k_cache .* got \[5, 2, 16, 32\]"),
        ({"v_cache": ((2, 6, 2, 16, 8), jnp.float32)}, r"v_cache .* got \[2, 6, 2, 16, 8\]"),
        ({"k_blocks": ((2, 4, 2, 16, 32), jnp.bfloat16)}, r"k_blocks .* got \[2, 4, 2, 16, 32\]"),
        ({"v_blocks": ((2, 3, 2, 16, 32), jnp.int8)}, r"v_blocks .* wanted \[2, 3, 2, 16, 8\]"),
        ({"k_blocks": ((2, 3, 2, 16, 32), jnp.float16)}, "k_blocks .* got float16, .* bfloat16"),
        ({"v_blocks": ((2, 3, 2, 16, 8), jnp.uint8)}, "v_blocks .* got uint8, .* int8"),
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
    jitted = jax.jit(block_scatter, donate_argnames=("k_cache", "v_cache"))
    exported = jax.export.export(jitted, platforms=[platform])(**abstract_arguments({}))
    assert exported.platforms == (platform,)


def any_bytes(rng, dims, dtype):
    """Any bit patterns but NaN: also infinities, negative zeros, subnormals.

    XLA:CPU of JAX 0.10.2 moves bfloat16 through float32, where one NaN becomes another.
    """
    dtype = jnp.dtype(dtype)
    bits = rng.integers(0, 256, (*dims[:-1], dims[-1] * dtype.itemsize), np.uint8)
    values = bits.view(dtype)
    if dtype == jnp.int8:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.where(np.isnan(values), dtype.type(0), values)


def bytes_of(array):
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_blocks_come_back_from_the_host_byte_by_byte(dtype):
    rng = np.random.default_rng(0)
    k_np, v_np = any_bytes(rng, (2, 8, 2, 4, 16), dtype), any_bytes(rng, (2, 8, 2, 4, 8), dtype)
    k_cache, v_cache = jnp.asarray(k_np), jnp.asarray(v_np)
    gather = jax.jit(block_gather)
    scatter = jax.jit(block_scatter, donate_argnums=(0, 1))

    out_ids = jnp.array([6, 1, 8, 3], jnp.int32)  # 8 is padding
    on_host = jax.device_get(gather(k_cache, v_cache, out_ids))
    for blocks, cache in zip(on_host, (k_np, v_np), strict=True):
        np.testing.assert_array_equal(bytes_of(blocks[:, 0]), bytes_of(cache[:, 6]))
        assert not bytes_of(blocks[:, 2]).any()

    # Back into other blocks, of which one was swapped out before.
    in_ids = jnp.array([2, 6, 9, 7], jnp.int32)
    k_cache, v_cache = scatter(k_cache, v_cache, *jax.device_put(on_host), in_ids)
    for cache, old in ((k_cache, k_np), (v_cache, v_np)):
        expected = old.copy()
        expected[:, [2, 6, 7]] = old[:, [6, 1, 3]]
        np.testing.assert_array_equal(bytes_of(cache), bytes_of(expected))
