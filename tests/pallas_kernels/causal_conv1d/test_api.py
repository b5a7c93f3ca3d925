"""Tests of `causal_conv1d/api.py`: the checks of arguments, and the example of its docstring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv1d.api import causal_conv1d
from tests import on_device
from tests.quick_compile import quick_jit

SHAPES = {
    "x": ((6, 5), jnp.bfloat16),
    "window": ((2, 3, 5), jnp.float32),
    "weight": ((4, 5), jnp.float32),
    "query_start_loc": ((3,), jnp.int32),
}


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_two_tokens_by_hand(implementation):
    y, window = quick_jit(causal_conv1d, implementation=implementation)(
        on_device.array([[3.0], [4.0]]),
        on_device.array([[[1.0], [2.0]]]),
        on_device.array([[1.0], [10.0], [100.0]]),
        on_device.array([0, 2], jnp.int32),
    )
    np.testing.assert_array_equal(y[:, 0], [321, 432])
    np.testing.assert_array_equal(window[0, :, 0], [3, 4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ((6,), jnp.float32)}, r"x has .* wanted \[num_tokens, num_channels\]"),
        ({"window": ((2, 4, 5), jnp.float32)}, r"window has .* wanted \[num_reqs, 3, 5\]"),
        ({"weight": ((4, 6), jnp.float32)}, r"weight has .* wanted \[kernel_size, 5\]"),
        ({"query_start_loc": ((2,), jnp.int32)}, r"query_start_loc has .* wanted \[3\]"),
        ({"query_start_loc": ((3,), jnp.float32)}, "wanted int32"),
        ({"x": ((6, 5), jnp.int32)}, "x has the wrong dtype"),
        (
            {"weight": ((1, 5), jnp.float32), "window": ((2, 0, 5), jnp.float32)},
            "2 rows or more, got 1",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    arrays = [jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(causal_conv1d, *arrays)
