"""A kernel that is quantized in parts equals one that is quantized whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.loading.quantize_in_parts import needs_parts, quantize_in_parts
from models.stored_kernels.scaled import ScaledKernel
from tests.models.stored_kernels.dequantized import dequantized

IN, PANEL_WIDTH = 64, 48


# In the first case, the last panel has fewer outputs. In the second, panels are narrower than
# `PANEL_WIDTH`.
@pytest.mark.parametrize(("num_outputs", "num_parts"), [(5 * 48 - 7, 5), (60, 2)])
@pytest.mark.parametrize("number_format", ["int4", "int8"])
def test_parts_are_joined_to_the_whole_kernel(num_outputs, num_parts, number_format):
    weight_np = np.random.default_rng(0).normal(size=(num_outputs, IN)).astype(np.float32)
    options = {"number_format": number_format, "group_size": 32, "panel_width": PANEL_WIDTH}
    shapes = []

    def quantize(part_np: np.ndarray) -> ScaledKernel:
        shapes.append(part_np.shape)
        return ScaledKernel.quantize(jnp.asarray(part_np.T), **options)

    whole = ScaledKernel.quantize(jnp.asarray(weight_np.T), **options)
    joined = quantize_in_parts(weight_np, quantize, panel_width=PANEL_WIDTH)
    assert len(shapes) == num_parts and len(set(shapes)) == 1
    assert joined.shape == whole.shape == (IN, num_outputs)
    assert joined.num_panels == whole.num_panels
    np.testing.assert_array_equal(dequantized(joined), dequantized(whole))
    same_structure = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert same_structure(joined) == same_structure(whole)


@pytest.mark.parametrize(
    ("shape", "panel_width", "wanted"),
    [
        ((2**13, 2**10), 128, True),
        # One panel, an accelerator without panels, experts, and a small matrix.
        ((2**7, 2**16), 128, False),
        ((2**13, 2**10), None, False),
        ((2, 2**12, 2**10), 128, False),
        ((2**11, 2**10), 128, False),
    ],
)
def test_only_large_matrices_in_panels_have_parts(shape, panel_width, wanted):
    assert needs_parts(np.broadcast_to(np.float32(0), shape), panel_width) == wanted
