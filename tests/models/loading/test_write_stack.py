"""Stacks have the bits of their layers, in every dtype that parameters are stored in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.layer_stack import StackPlace
from models.loading.write_stack import finish_stack, write_layer

NUM_LAYERS = 3


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [
        *((2, dtype) for dtype in ("float32", "bfloat16", "int8", "uint8", "float8_e4m3fn")),
        (None, "int8"),  # matrices, which are not of experts
    ],
)
def test_expert_e_of_layer_l_is_matrix_e_times_layers_plus_l(num_experts, dtype):
    dims = (5, 8) if num_experts is None else (num_experts, 5, 8)
    bytes_np = np.random.default_rng(0).integers(0, 256, (NUM_LAYERS, *dims), np.uint8)
    stack = None
    for layer_idx, layer_np in enumerate(bytes_np.view(jnp.dtype(dtype))):
        place = StackPlace(
            stack="kernel",
            layer_idx=layer_idx,
            num_layers=NUM_LAYERS,
            shape=(num_experts or 1, *layer_np.shape[-2:]),
        )
        stack = write_layer(stack, jax.device_put(layer_np), place)
    stack = finish_stack(stack)
    assert stack.dtype == dtype
    wanted = bytes_np.reshape(NUM_LAYERS, -1, 5, 8).swapaxes(0, 1).reshape(-1, 5, 8)
    np.testing.assert_array_equal(np.asarray(stack).view(np.uint8), wanted)
