"""Tests of `quantized_cache.py` against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized_cache import LARGEST_STORED, check_scales, is_quantized, quantize
from tests.quick_compile import quick_jit

NUM_KV_HEADS = 3


def quick_quantize(x, scale, dtype):
    return quick_jit(quantize, dtype=dtype)(x, scale)


def draw(rng, largest):
    """Values of which some are beyond what scale times the largest stored number holds."""
    return rng.uniform(-1.2 * largest, 1.2 * largest, (64, NUM_KV_HEADS, 40)).astype(np.float32)


def quantize_in_numpy(x, scale, dtype):
    scaled = x / scale[:, None]
    if dtype == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("dtype", sorted(LARGEST_STORED))
def test_equals_numpy_bit_by_bit(dtype):
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.01, 0.1, NUM_KV_HEADS).astype(np.float32)
    x = draw(rng, 0.1 * LARGEST_STORED[dtype])
    got = quick_quantize(x, scale, dtype)
    assert got.dtype == jnp.dtype(dtype)
    wanted = quantize_in_numpy(x, scale, dtype)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", sorted(LARGEST_STORED))
def test_reading_back_is_within_half_a_step(dtype):
    rng = np.random.default_rng(1)
    scale = rng.uniform(0.01, 0.1, NUM_KV_HEADS).astype(np.float32)
    x = draw(rng, 1.0) * scale[:, None] * LARGEST_STORED[dtype] / 1.2
    stored = np.asarray(quick_quantize(x, scale, dtype)).astype(np.float64)
    error = np.abs(stored * scale[:, None].astype(np.float64) - x)
    if dtype == "int8":
        bound = scale[:, None] / 2
    else:
        # float8_e4m3fn keeps 3 bits behind the leading one, and steps of 2**-9 near 0.
        bound = np.maximum(np.abs(x) * 2.0**-4, scale[:, None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize(("dtype", "wanted"), [("int8", 127.0), ("float8_e4m3fn", 448.0)])
def test_values_too_large_are_clipped(dtype, wanted):
    x = jnp.array([[[1e6, -1e6, jnp.inf, -jnp.inf]]])
    got = np.asarray(quick_quantize(x, jnp.ones(1), dtype)).astype(np.float32)
    assert got.ravel().tolist() == [wanted, -wanted, wanted, -wanted]


def test_int8_rounds_to_the_nearest_even():
    x = jnp.array([[[0.5, 1.5, -0.5, 2.6, -2.4]]])
    assert quantize(x, jnp.ones(1), jnp.int8).ravel().tolist() == [0, 2, 0, 3, -2]


def test_each_head_has_its_own_scale():
    x = jnp.full((1, 2, 1), 6.0)
    assert quantize(x, jnp.array([1.0, 3.0]), jnp.int8).ravel().tolist() == [6, 2]


def test_a_cache_of_floats_is_a_cast():
    x = jnp.full((1, 1, 1), 1.5, jnp.float32)
    got = quantize(x, None, jnp.bfloat16)
    assert (got.dtype, got.item()) == (jnp.bfloat16, 1.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_too_large_for_a_narrower_float_becomes_its_largest(dtype):
    x = jnp.array([-1e6, -3.5, 65_504.0, 3e38, jnp.inf, jnp.nan], dtype).reshape(1, 1, -1)
    got = quantize(x, None, jnp.float16).ravel()
    wanted = [-65_504.0, -3.5, 65_504.0, 65_504.0, 65_504.0, jnp.nan]
    assert got.dtype == jnp.float16
    assert jnp.array_equal(got, jnp.array(wanted, jnp.float16), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_not_quantized(dtype):
    assert not is_quantized(jnp.dtype(dtype))


def check(dtype="int8", k_scale=(NUM_KV_HEADS,), v_scale=(NUM_KV_HEADS,), scale_dtype=jnp.float32):
    def scale(shape):
        return shape and jax.ShapeDtypeStruct(shape, scale_dtype)

    kv_cache = jax.ShapeDtypeStruct((1, 4, NUM_KV_HEADS, 8, 16), dtype)
    check_scales("op", kv_cache, k_scale=scale(k_scale), v_scale=scale(v_scale))


def test_a_quantized_cache_with_both_scales_is_accepted():
    check()
    check("float8_e4m3fn")
    check("bfloat16", None, None)
    check("uint16", None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": None}, r"op: a cache of int8 needs k_scale: got None, wanted f32\[3\]"),
        ({"v_scale": None}, r"a cache of int8 needs v_scale"),
        ({"dtype": "float8_e4m3fn", "v_scale": None}, "a cache of float8_e4m3fn needs v_scale"),
        (
            {"dtype": "bfloat16"},
            "k_scale belongs to a quantized cache: got one with a cache of bfloat16",
        ),
        ({"dtype": "float32", "k_scale": None}, "v_scale belongs to a quantized cache"),
        ({"k_scale": (4,)}, r"k_scale has the wrong shape: got \[4\], wanted \[3\]"),
        ({"v_scale": (3, 1)}, r"v_scale has the wrong shape: got \[3, 1\], wanted \[3\]"),
        ({"scale_dtype": jnp.int32}, "k_scale has the wrong dtype: got int32, wanted a float"),
    ],
)
def test_scales_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check(**options)
