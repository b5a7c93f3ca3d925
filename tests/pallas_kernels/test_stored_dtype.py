"""Tests of `stored_dtype.py` against NumPy's views of the same bits."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.stored_dtype import as_stored, as_values, check_kv_dtype
from tests import on_device
from tests.quick_compile import quick_jit

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_cache_of_uint16_holds_the_bits_of_the_floats(kv_dtype):
    x = np.random.default_rng(0).standard_normal((5, 2, 8), np.float32)
    call = quick_jit(as_stored, cache_dtype=jnp.uint16, kv_dtype=kv_dtype)
    stored = np.asarray(call(x))
    assert stored.dtype == np.uint16
    np.testing.assert_array_equal(stored, x.astype(DTYPES[kv_dtype]).view(np.uint16))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_every_pattern_of_bits_survives(kv_dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    values = np.asarray(quick_jit(as_values, kv_dtype=kv_dtype)(bits))
    assert values.dtype == DTYPES[kv_dtype]
    # By their bits, since NumPy warns of a signalling NaN. A NaN may come back as another NaN.
    infinity = np.array(np.inf, DTYPES[kv_dtype]).view(np.uint16)
    is_nan = bits & 0x7FFF > infinity
    got = values.view(np.uint16)
    np.testing.assert_array_equal(got & 0x7FFF > infinity, is_nan)
    np.testing.assert_array_equal(got[~is_nan], bits[~is_nan])


def test_a_cache_of_floats_is_a_cast():
    x = on_device.full((1, 1, 1), 1.5, jnp.float32)
    got = as_stored(x, jnp.dtype("bfloat16"), None)
    assert (got.dtype, got.item()) == (jnp.bfloat16, 1.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_too_large_for_a_narrower_float_becomes_its_largest(dtype):
    x = on_device.array([-1e6, -3.5, 65_504.0, 3e38, jnp.inf, jnp.nan], dtype).reshape(1, 1, -1)
    got = as_stored(x, jnp.dtype("float16"), None).ravel()
    wanted = [-65_504.0, -3.5, 65_504.0, 65_504.0, 65_504.0, jnp.nan]
    assert got.dtype == jnp.float16
    assert jnp.array_equal(got, on_device.array(wanted, jnp.float16), equal_nan=True)


def test_a_number_too_large_for_float16_becomes_its_largest_in_bits_too():
    call = quick_jit(as_stored, cache_dtype=jnp.uint16, kv_dtype="float16")
    stored = np.asarray(call(np.float32([[[1e6, -1e6]]])))
    assert stored.view(np.float16).ravel().tolist() == [65_504.0, -65_504.0]


def test_other_caches_need_no_kv_dtype():
    for dtype in ("float32", "float16", "bfloat16"):
        check_kv_dtype("op", jnp.dtype(dtype), None)
    check_kv_dtype("op", jnp.dtype("uint16"), jnp.bfloat16)
    check_kv_dtype("op", jnp.dtype("uint16"), jnp.dtype("float16"))


@pytest.mark.parametrize(
    ("cache_dtype", "kv_dtype", "message"),
    [
        ("uint16", None, "op: a uint16 kv_cache needs kv_dtype.* got None, wanted one of"),
        ("uint16", "float32", "got float32, wanted one of .*'bfloat16', 'float16'"),
        (
            "float16",
            "float16",
            "kv_dtype is only for a uint16 kv_cache: got float16 with a cache",
        ),
        ("int8", "bfloat16", "got bfloat16 with a cache of int8. Leave it at None"),
        ("int32", None, "kv_cache has the wrong dtype: got int32, wanted a float of 16 bits"),
        ("int8", None, "got int8, wanted a float of 16 bits or more, or uint16 with kv_dtype"),
        ("float8_e4m3fn", None, "got float8_e4m3fn, wanted a float of 16 bits or more"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(cache_dtype, kv_dtype, message):
    with pytest.raises(ValueError, match=message):
        check_kv_dtype("op", jnp.dtype(cache_dtype), kv_dtype)
