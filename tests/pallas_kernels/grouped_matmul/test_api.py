"""Tests of `grouped_matmul/api.py`: the checks of arguments and the choice of a body."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.grouped_matmul.api import _BODIES, grouped_matmul
from pallas_kernels.target import Target

SHAPES = {
    "x": ((24, 64), jnp.bfloat16),
    "weights": ((5, 64, 128), jnp.bfloat16),
    "tile_groups": ((3,), jnp.int32),
    "tile_sizes": ((3,), jnp.int32),
}
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def result_of(changes, **options):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    return jax.eval_shape(lambda arguments: grouped_matmul(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_result_has_a_row_for_each_place_and_the_dtype_of_x(implementation):
    out = result_of({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((24, 128), jnp.bfloat16)
    bits = {"weights": ((5, 64, 128), jnp.uint16)}
    out = result_of(bits, weights_dtype="bfloat16", implementation=implementation)
    assert (out.shape, out.dtype) == ((24, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"x": ((24,), jnp.float32)}, {}, r"x .* wanted \[num_tiles \* tile_rows, in_features\]"),
        ({"weights": ((5, 32, 128), jnp.bfloat16)}, {}, r"got \[5, 32, 128\], wanted \[num_groups"),
        ({"tile_groups": ((3,), jnp.uint32)}, {}, "tile_groups .* got uint32, wanted int32"),
        ({"tile_sizes": ((2,), jnp.int32)}, {}, r"tile_sizes .* got \[2\], wanted \[3\]"),
        (
            {"tile_groups": ((0,), jnp.int32), "tile_sizes": ((0,), jnp.int32)},
            {},
            "tile_groups is empty",
        ),
        (
            {"tile_groups": ((5,), jnp.int32), "tile_sizes": ((5,), jnp.int32)},
            {},
            "x has 24 rows; wanted a multiple of the number of tiles, 5",
        ),
        ({"x": ((24, 64), jnp.int8)}, {}, "x has the wrong dtype: got int8, wanted a float"),
        ({"x": ((24, 64), jnp.float32)}, {}, "weights are bfloat16; wanted x's dtype, float32"),
        ({"weights": ((5, 64, 128), jnp.uint16)}, {}, "uint16 weights need weights_dtype"),
        (
            {"weights": ((5, 64, 128), jnp.uint16)},
            {"weights_dtype": "float16"},
            "weights are float16; wanted x's dtype, bfloat16",
        ),
        ({}, {"weights_dtype": "bfloat16"}, "weights_dtype is only for uint16 weights"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        result_of(changes, **options)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"got 'triton', wanted None or one of .*'xla'"):
        result_of({}, implementation="triton")


def test_signature_names_no_backend():
    parameters = list(inspect.signature(grouped_matmul).parameters)
    assert parameters == [*SHAPES, "weights_dtype", "implementation", "target"]


@pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
@pytest.mark.parametrize(
    ("tile_rows", "in_features", "out_features", "dtype", "wanted"),
    [
        (8, 64, 128, jnp.bfloat16, "mosaic_gpu"),
        (128, 2880, 2944, jnp.float16, "mosaic_gpu"),
        (8, 64, 128, jnp.float32, "xla"),
        (4, 64, 128, jnp.bfloat16, "xla"),
        (8, 96, 128, jnp.bfloat16, "xla"),
        (8, 64, 96, jnp.bfloat16, "xla"),
    ],
)
def test_an_h200_runs_the_kernel_where_it_fits(tile_rows, in_features, out_features, dtype, wanted):
    arguments = (
        jax.ShapeDtypeStruct((3 * tile_rows, in_features), dtype),
        jax.ShapeDtypeStruct((5, in_features, out_features), dtype),
        *[jax.ShapeDtypeStruct((3,), jnp.int32)] * 2,
    )
    body = preferred_body("grouped_matmul", _BODIES, H200, *arguments, weights_dtype=None)
    assert body == wanted
