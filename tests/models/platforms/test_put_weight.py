"""A weight becomes the same array whether the host or the device casts and transposes it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.platforms.huge_pages import HUGE_PAGE_BYTES
from models.platforms.put_weight import cast_on_device, cast_on_host


# Each shape compiles a program for each pair of dtypes.
@pytest.mark.parametrize(
    "shape",
    [
        *((), (129, 70), (3, 600, 700)),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((5,), (3, 4), (3, 65, 4))),
    ],
)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_host_and_device_make_the_same_bits(shape, wanted):
    dtype = jnp.dtype(wanted)
    for stored in (np.float32, np.float16, ml_dtypes.bfloat16):
        weight_np = np.random.default_rng(0).standard_normal(shape).astype(stored)
        if weight_np.size > 3:
            weight_np.flat[:3] = np.array([6e4, -3e-8, 1 + 2**-12]).astype(stored)
        if stored != np.float16 and weight_np.size > 3:
            weight_np.flat[3] = 1e5  # infinite in float16
        for is_transposed in (False, True) if len(shape) > 1 else (False,):
            on_host = cast_on_host(weight_np, dtype, is_transposed=is_transposed)
            on_device = cast_on_device(weight_np, dtype, is_transposed=is_transposed)
            assert (on_host.shape, on_host.dtype) == (on_device.shape, dtype)
            assert np.asarray(on_host).tobytes() == np.asarray(on_device).tobytes()
            wanted_np = weight_np.swapaxes(-1, -2) if is_transposed else weight_np
            with np.errstate(over="ignore"):
                assert np.array_equal(on_host, wanted_np.astype(dtype))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="another device copies")
def test_large_array_begins_at_a_huge_page_and_is_not_copied():
    weight_np = np.ones((2 * HUGE_PAGE_BYTES // 4, 2), np.float32)
    array = cast_on_host(weight_np, jnp.dtype("float32"), is_transposed=True)
    assert array.unsafe_buffer_pointer() % HUGE_PAGE_BYTES == 0
    # The caller's memory is no part of it.
    weight_np[0] = 7
    assert float(array.max()) == 1
