"""Tests of `scaled_grouped_matmul/api.py`: the checks of arguments and the choice of a body."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.scaled_grouped_matmul.api import (
    scaled_grouped_matmul,
    scaled_grouped_matmul_body,
)
from pallas_kernels.target import Target

SHAPES = {
    "x": ((24, 128), jnp.bfloat16),
    "numbers": ((5, 2, 32, 192), jnp.uint8),
    "scales": ((5, 2, 192), jnp.float32),
    "zeros": ((5, 2, 192), jnp.uint8),
    "tile_experts": ((3,), jnp.int32),
    "tile_sizes": ((3,), jnp.int32),
}
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def result_of(changes, **options):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    options = {"number_format": "int4", **options}
    return jax.eval_shape(lambda arrays: scaled_grouped_matmul(**arrays, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_result_has_a_row_for_each_place_and_the_dtype_of_x(implementation):
    out = result_of({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((24, 192), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"number_format": "int2"}, "number_format is 'int2'; wanted one of .*'int4'"),
        ({"x": ((24, 64), jnp.float32)}, {}, r"got \[24, 64\], wanted \[num_tiles"),
        ({"x": ((25, 128), jnp.float32)}, {}, "x has 25 rows; wanted a multiple .* tiles, 3"),
        ({"numbers": ((2, 32, 192), jnp.uint8)}, {}, r"numbers .* wanted \[num_experts"),
        ({"numbers": ((5, 2, 32, 192), jnp.int8)}, {}, "numbers of int4 are int8; wanted uint8"),
        ({"scales": ((5, 192), jnp.float32)}, {}, r"scales .* wanted \[5, 2, 192\]"),
        ({"zeros": ((5, 1, 192), jnp.uint8)}, {}, r"zeros .* wanted \[5, 2, 192\]"),
        ({"tile_experts": ((3,), jnp.uint32)}, {}, "tile_experts .* got uint32, wanted int32"),
        ({"tile_sizes": ((2,), jnp.int32)}, {}, r"tile_sizes .* got \[2\], wanted \[3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        result_of(changes, **options)


def test_signature_names_no_backend():
    parameters = list(inspect.signature(scaled_grouped_matmul).parameters)
    assert parameters == [*SHAPES, "number_format", "implementation", "target"]


@pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
@pytest.mark.parametrize(
    ("tile_rows", "bytes_per_group", "out_features", "wanted"),
    [
        (8, 32, 2880, "mosaic_gpu"),
        (128, 64, 64, "mosaic_gpu"),
        (4, 32, 64, "xla"),
        (96, 32, 64, "xla"),
        (8, 32, 96, "xla"),
        (8, 8, 64, "xla"),
    ],
)
def test_an_h200_runs_the_kernel_where_it_fits(tile_rows, bytes_per_group, out_features, wanted):
    tiles = jax.ShapeDtypeStruct((3,), jnp.int32)
    body = scaled_grouped_matmul_body(
        jax.ShapeDtypeStruct((3 * tile_rows, 4 * bytes_per_group), jnp.bfloat16),
        jax.ShapeDtypeStruct((5, 2, bytes_per_group, out_features), jnp.uint8),
        jax.ShapeDtypeStruct((5, 2, out_features), jnp.float32),
        *(None, tiles, tiles),
        number_format="int4",
        target=H200,
    )
    assert body == wanted
