"""`scaled_matmul` compiled for an H200: its kernel's resources, and no widened matrix."""

import functools

import jax.numpy as jnp
import pytest

import pallas_kernels

IN_FEATURES, OUT_FEATURES = 2048, 4096
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


def compile_product(
    gpus, compile_for_h200, number_format, group_size, num_rows, *, out=OUT_FEATURES, zeros=False
):
    num_groups = IN_FEATURES // group_size
    num_bytes = group_size // 2 if number_format == "int4" else group_size
    dtype = jnp.int8 if number_format == "int8" else jnp.uint8
    return compile_for_h200(
        functools.partial(
            pallas_kernels.scaled_matmul, number_format=number_format, target=gpus.target
        ),
        gpus.array((num_rows, IN_FEATURES), jnp.bfloat16),
        gpus.array((num_groups, num_bytes, out), dtype),
        gpus.array((num_groups, out), jnp.float32),
        gpus.array((num_groups, out), jnp.uint8) if zeros else None,
        compiler_options=SMALLEST_GRAPH,
    )


@pytest.mark.parametrize(
    ("number_format", "group_size", "num_rows", "options", "most_registers", "ctas_per_sm"),
    [
        ("int8", 128, 8, {}, 72, 3),
        ("int8", IN_FEATURES, 16, {}, 72, 3),
        ("int8", 32, 32, {}, 96, 2),
        ("int8", 128, 64, {}, 104, 2),
        ("int4", 128, 16, {}, 120, 2),
        ("int4", 128, 64, {}, 104, 2),
        ("int4", 64, 16, {}, 80, 3),
        ("int4", 64, 64, {}, 96, 2),
        ("int4", 32, 16, {}, 72, 4),
        ("int4", IN_FEATURES, 16, {"zeros": True}, 120, 2),
        ("int4", 64, 16, {"zeros": True}, 96, 3),
        ("int4", 64, 16, {"out": 576}, 64, 5),
        ("e4m3", 128, 16, {}, 72, 3),
        ("e4m3", 128, 64, {}, 104, 2),
    ],
)
def test_kernel_fits_an_sm_without_spills(
    h200,
    compile_for_h200,
    number_format,
    group_size,
    num_rows,
    options,
    most_registers,
    ctas_per_sm,
):
    program = compile_product(
        *(h200, compile_for_h200, number_format, group_size, num_rows), **options
    )
    assert program.kernel_names == program.in_command_buffer == ["scaled_matmul"]
    (kernel,) = program.ptxas
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
    assert (kernel.num_threads, kernel.ctas_per_sm) == (256, ctas_per_sm)
    assert kernel.registers <= most_registers


@pytest.mark.parametrize(
    ("number_format", "group_size"), [("int8", 128), ("int4", 64), ("e4m3", 128)]
)
def test_no_array_of_the_size_of_the_matrix_is_written(
    h200, compile_for_h200, number_format, group_size
):
    num_stored = IN_FEATURES * OUT_FEATURES // (2 if number_format == "int4" else 1)
    few = compile_product(h200, compile_for_h200, number_format, group_size, 16)
    assert few.cache_copies(min_bytes=num_stored) == []
    # Temporary memory has the sums of the parts of the inputs, and little else.
    assert few.temp_bytes <= 9 * 4 * 16 * OUT_FEATURES
    # Plain XLA computes more rows, and writes the widened matrix.
    many = compile_product(h200, compile_for_h200, number_format, group_size, 65)
    assert many.kernel_names == []
    assert many.temp_bytes >= 2 * IN_FEATURES * OUT_FEATURES
