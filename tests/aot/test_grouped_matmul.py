"""`grouped_matmul` compiled for an H200: its kernel's resources, and no copies of weights."""

import functools

import jax.numpy as jnp
import pytest

import pallas_kernels

IN_FEATURES, OUT_FEATURES, NUM_TILES = 2048, 768, 100
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


def args_of(gpus, *, tile_rows, num_groups=128, out_features=OUT_FEATURES, dtype=jnp.bfloat16):
    return (
        gpus.array((NUM_TILES * tile_rows, IN_FEATURES), dtype),
        gpus.array((num_groups, IN_FEATURES, out_features), dtype),
        gpus.array((NUM_TILES,), jnp.int32),
        gpus.array((NUM_TILES,), jnp.int32),
    )


def multiply_on(gpus):
    return functools.partial(pallas_kernels.grouped_matmul, target=gpus.target)


@pytest.mark.parametrize(
    ("tile_rows", "out_features", "most_registers", "ctas_per_sm"),
    [
        (8, OUT_FEATURES, 40, 3),
        (16, OUT_FEATURES, 48, 2),
        (32, OUT_FEATURES, 64, 2),
        (64, OUT_FEATURES, 96, 2),
        (128, OUT_FEATURES, 160, 1),
        # Not a multiple of 128: CTAs of 64 columns.
        (8, 704, 40, 5),
        (16, 704, 48, 5),
        (64, 704, 64, 3),
        (128, 704, 96, 2),
    ],
)
def test_kernel_fits_an_sm_without_spills(
    h200, compile_for_h200, tile_rows, out_features, most_registers, ctas_per_sm
):
    program = compile_for_h200(
        multiply_on(h200),
        *args_of(h200, tile_rows=tile_rows, out_features=out_features),
        compiler_options=SMALLEST_GRAPH,
    )
    assert program.kernel_names == program.in_command_buffer == ["grouped_matmul"]
    (kernel,) = program.ptxas
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
    assert (kernel.num_threads, kernel.ctas_per_sm) == (256, ctas_per_sm)
    assert kernel.registers <= most_registers


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_program_allocates_only_its_arguments(h200, compile_for_h200, dtype):
    temp_bytes = [
        compile_for_h200(
            multiply_on(h200), *args_of(h200, tile_rows=8, num_groups=num_groups, dtype=dtype)
        ).temp_bytes
        for num_groups in (8, 128)
    ]
    assert temp_bytes == [0, 0]
