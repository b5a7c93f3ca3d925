"""`scaled_grouped_matmul` compiled for an H200 fits an SM, and widens no expert in memory."""

import functools

import jax.numpy as jnp
import pytest

import pallas_kernels

IN_FEATURES, OUT_FEATURES, NUM_EXPERTS, NUM_TILES = 2048, 768, 32, 40
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


@pytest.mark.parametrize(
    ("number_format", "group_size", "tile_rows", "options", "most_registers", "ctas_per_sm"),
    [
        ("int4", 64, 8, {}, 72, 4),
        ("int4", 64, 16, {}, 80, 3),
        ("int4", 32, 16, {"zeros": True}, 80, 3),
        ("int4", 128, 16, {}, 120, 2),
        ("int4", 64, 64, {}, 96, 2),
        ("int4", 64, 128, {}, 96, 2),
        ("int8", 128, 16, {}, 80, 3),
        ("e2m1", 32, 16, {}, 64, 4),
        ("e2m1", 32, 128, {}, 112, 2),
        ("e4m3", 128, 8, {}, 72, 3),
        ("e4m3", 128, 16, {"out": 704}, 64, 4),
        ("e4m3", 128, 128, {}, 104, 2),
    ],
)
def test_kernel_fits_an_sm_without_spills(
    h200,
    compile_for_h200,
    number_format,
    group_size,
    tile_rows,
    options,
    most_registers,
    ctas_per_sm,
):
    out = options.get("out", OUT_FEATURES)
    num_groups = IN_FEATURES // group_size
    num_bytes = group_size // 2 if number_format in ("int4", "e2m1") else group_size
    dtype = jnp.int8 if number_format == "int8" else jnp.uint8
    tiles = h200.array((NUM_TILES,), jnp.int32)
    program = compile_for_h200(
        functools.partial(
            pallas_kernels.scaled_grouped_matmul, number_format=number_format, target=h200.target
        ),
        h200.array((NUM_TILES * tile_rows, IN_FEATURES), jnp.bfloat16),
        h200.array((NUM_EXPERTS, num_groups, num_bytes, out), dtype),
        h200.array((NUM_EXPERTS, num_groups, out), jnp.float32),
        h200.array((NUM_EXPERTS, num_groups, out), jnp.uint8) if "zeros" in options else None,
        *(tiles, tiles),
        compiler_options=SMALLEST_GRAPH,
    )
    assert program.kernel_names == program.in_command_buffer == ["scaled_grouped_matmul"]
    # No numbers are copied, and none is widened in memory.
    assert program.temp_bytes == 0
    (kernel,) = program.ptxas
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
    assert (kernel.num_threads, kernel.ctas_per_sm) == (256, ctas_per_sm)
    assert kernel.registers <= most_registers
