"""Tests of `scaled_matmul/api.py`: the checks of arguments and the choice of a body."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, collect_misfits
from pallas_kernels.scaled_matmul.api import scaled_matmul, scaled_matmul_body
from pallas_kernels.target import Target

SHAPES = {
    "x": ((24, 128), jnp.bfloat16),
    "numbers": ((2, 32, 192), jnp.uint8),
    "scales": ((2, 192), jnp.float32),
    "zeros": ((2, 192), jnp.uint8),
}
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def result_of(changes, **options):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    options = {"number_format": "int4", **options}
    return jax.eval_shape(lambda arguments: scaled_matmul(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_result_has_a_row_for_each_row_of_x_in_float32(implementation):
    out = result_of({}, implementation=implementation)
    assert (out.shape, out.dtype) == ((24, 192), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"number_format": "int2"}, "number_format is 'int2'; wanted one of .*'int4'"),
        ({"x": ((24,), jnp.float32)}, {}, r"x .* wanted \[num_rows, in_features\]"),
        ({"x": ((24, 64), jnp.float32)}, {}, r"got \[24, 64\], wanted \[num_rows, 128\]"),
        ({"x": ((24, 128), jnp.int8)}, {}, "x has the wrong dtype: got int8, wanted a float"),
        ({"x": ((0, 128), jnp.float32)}, {}, "x is empty"),
        ({"numbers": ((64, 192), jnp.uint8)}, {}, "numbers .* wanted .*bytes_per_group"),
        ({"numbers": ((2, 32, 192), jnp.int8)}, {}, "numbers of int4 are int8; wanted uint8"),
        ({"scales": ((2, 64), jnp.float32)}, {}, r"scales .* wanted \[2, 192\]"),
        ({"scales": ((2, 192), jnp.bfloat16)}, {}, "scales are bfloat16; wanted float32 or uint8"),
        ({"zeros": ((1, 192), jnp.uint8)}, {}, r"zeros .* wanted \[2, 192\]"),
        ({"zeros": ((2, 192), jnp.int8)}, {}, "zeros are int8; wanted uint8"),
        (
            {"x": ((24, 64), jnp.float32)},
            {"number_format": "e4m3"},
            "zeros are only for int4; the format is e4m3",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        result_of(changes, **options)


def test_signature_names_no_backend():
    parameters = list(inspect.signature(scaled_matmul).parameters)
    assert parameters == [*SHAPES, "number_format", "implementation", "target"]


@pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
@pytest.mark.parametrize(
    ("number_format", "num_rows", "bytes_per_group", "out_features", "dtype", "wanted"),
    [
        ("int4", 1, 32, 201_088, jnp.bfloat16, "mosaic_gpu"),
        ("int4", 64, 16, 64, jnp.bfloat16, "mosaic_gpu"),
        ("int8", 64, 2_880, 64, jnp.bfloat16, "mosaic_gpu"),
        ("e4m3", 8, 128, 64, jnp.bfloat16, "mosaic_gpu"),
        ("e2m1", 8, 64, 64, jnp.bfloat16, "mosaic_gpu"),
        ("int4", 65, 64, 64, jnp.bfloat16, "xla"),
        ("int4", 64, 64, 64, jnp.float16, "xla"),
        ("int4", 64, 64, 32, jnp.bfloat16, "xla"),
        ("int4", 64, 8, 64, jnp.bfloat16, "xla"),
        # The two numbers of a byte belong to inputs 96 apart, in pieces of 32 rows.
        ("int4", 64, 96, 64, jnp.bfloat16, "xla"),
        ("int8", 64, 96, 64, jnp.bfloat16, "mosaic_gpu"),
        ("int8", 64, 16, 64, jnp.bfloat16, "xla"),
    ],
)
def test_an_h200_runs_the_kernel_where_it_fits(
    number_format, num_rows, bytes_per_group, out_features, dtype, wanted
):
    num_inputs = 2 * bytes_per_group * (2 if number_format in ("int4", "e2m1") else 1)
    stored = jnp.int8 if number_format == "int8" else jnp.uint8
    body = scaled_matmul_body(
        jax.ShapeDtypeStruct((num_rows, num_inputs), dtype),
        jax.ShapeDtypeStruct((2, bytes_per_group, out_features), stored),
        jax.ShapeDtypeStruct((2, out_features), jnp.float32),
        None,
        number_format=number_format,
        target=H200,
    )
    assert body == wanted


@pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
def test_all_large_numbers_of_rows_share_one_log_line():
    with collect_misfits() as misfits:
        for num_rows in (65, 512):
            result_of({"x": ((num_rows, 128), jnp.bfloat16)}, target=H200)
    assert list(misfits) == [
        "scaled_matmul runs as plain XLA, not as mosaic_gpu: x has more than 64 rows."
    ]
