"""Tests of `kv_scatter/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_scatter.api import kv_scatter
from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from tests.quick_compile import quick_jit

SHAPES = {
    "k_cache": ((2, 5, 2, 16, 32), jnp.float32),
    "v_cache": ((2, 5, 2, 16, 8), jnp.float32),
    "k": ((6, 2, 32), jnp.float32),
    "v": ((6, 2, 8), jnp.float32),
    "slots": ((6,), jnp.int32),
    "row": ((), jnp.int32),
}


def shapes_of_result(changes, implementation=None, names=tuple(SHAPES)):
    arguments = {name: jax.ShapeDtypeStruct(*(SHAPES | changes)[name]) for name in names}
    call = lambda arguments: kv_scatter(**arguments, implementation=implementation)  # noqa: E731
    return jax.eval_shape(call, arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_both_caches(implementation):
    k_cache, v_cache = shapes_of_result({}, implementation)
    assert (k_cache.shape, k_cache.dtype) == SHAPES["k_cache"]
    assert (v_cache.shape, v_cache.dtype) == SHAPES["v_cache"]


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_nothing_to_do_is_no_error(implementation):
    changes = {
        "k": ((0, 2, 32), jnp.float32),
        "v": ((0, 2, 8), jnp.float32),
        "slots": ((0,), jnp.int32),
    }
    k_cache, v_cache = shapes_of_result(changes, implementation)
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


def test_values_are_cast_to_the_dtype_of_the_cache():
    cache = jnp.zeros((1, 2, 1, 8, 4), jnp.float16)
    token = jnp.full((1, 1, 4), 1.5, jnp.float32)
    slots = jnp.array([9], jnp.int32)
    k_cache, _ = kv_scatter(cache, cache, token, token, slots, 0)
    assert k_cache.dtype == jnp.float16
    assert k_cache[0, 1, 0, 1].tolist() == [1.5] * 4


def quantise_in_numpy(x, scale, dtype):
    scaled = np.asarray(x) / np.asarray(scale)[:, None]
    if dtype == np.int8:
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)


QUANTISED = [case for case in CASES if case.dtype in ("int8", "float8_e4m3fn")]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: case.name)
def test_a_quantised_cache_holds_what_numpy_computes(case, implementation):
    inputs = build_inputs(case)
    block_size, num_slots = case.block_size, case.num_blocks * case.block_size
    call = lambda arrays, scales: kv_scatter(  # noqa: E731
        *arrays, **scales, implementation=implementation
    )
    got = quick_jit(call)(inputs.arguments, inputs.scales)
    news = ((inputs.k, inputs.k_scale), (inputs.v, inputs.v_scale))
    olds = (inputs.k_cache, inputs.v_cache)
    num_clipped = 0
    for got_cache, old, (new, scale) in zip(got, olds, news, strict=True):
        expected = np.asarray(old).copy()
        stored = quantise_in_numpy(new, scale, expected.dtype)
        for token, slot in zip(stored, np.asarray(inputs.slots), strict=True):
            if slot < num_slots:
                expected[case.row, slot // block_size, :, slot % block_size] = token
        as_bytes = np.asarray(got_cache).view(np.uint8)
        np.testing.assert_array_equal(as_bytes, expected.view(np.uint8))
        largest = {"int8": 127, "float8_e4m3fn": 448}[case.dtype]
        num_clipped += (np.abs(stored.astype(np.float32)) == largest).sum()
    assert num_clipped > 0  # the case reaches that far


@pytest.mark.parametrize(
    ("changes", "scales", "message"),
    [
        ({"k_cache": jnp.int8}, {}, r"a cache of int8 needs k_scale: got None, wanted f32\[2\]"),
        ({"v_cache": jnp.float8_e4m3fn}, {}, "a cache of float8_e4m3fn needs v_scale"),
        ({}, {"k_scale": (2,)}, "k_scale belongs to a quantised cache"),
        ({"v_cache": jnp.int8}, {"v_scale": (3,)}, r"v_scale .* got \[3\], wanted \[2\]"),
        ({"k_cache": jnp.int32}, {}, "k_cache has the wrong dtype: got int32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changes, scales, message):
    changed = {name: (SHAPES[name][0], dtype) for name, dtype in changes.items()}
    with pytest.raises(ValueError, match=message):
        shapes_of_result(
            changed | {name: (dims, jnp.float32) for name, dims in scales.items()},
            names=(*SHAPES, *scales),
        )


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_default_body_lowers_for_accelerators(platform):
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in SHAPES.items()}
    jitted = jax.jit(kv_scatter, donate_argnames=("k_cache", "v_cache"))
    exported = jax.export.export(jitted, platforms=[platform])(**arguments)
    assert exported.platforms == (platform,)
