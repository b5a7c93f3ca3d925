"""Mosaic GPU body of `scaled_grouped_matmul` on Hopper.

A CTA computes some columns of the products of up to 64 rows of a tile, from the stored bytes of the
tile's expert (`scaled_matmul/mosaic_gpu_pieces.py`). CTAs without rows end at once, so experts
without rows are not read. An expert whose rows fit one CTA is read once. The CTAs of an expert with
more rows are neighbors in the grid, so that its bytes are in the L2 cache when the next of them
reads them again.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.cache_layout import INT32_MAX
from pallas_kernels.number_format import NumberFormat
from pallas_kernels.scaled_matmul.mosaic_gpu_pieces import (
    COMPUTE,
    COPY,
    ROWS_OF_CTA,
    Part,
    Plan,
    copy_pieces,
    make_plan,
    matrix_of,
    matrix_operands,
    misfit_of_matrix,
    multiply_pieces,
    stage_types,
    stages_of,
    swizzled,
)
from pallas_kernels.tma_boxes import MAX_GRID_YZ


def misfit(
    x: jax.Array,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    tile_experts: jax.Array,
    tile_sizes: jax.Array,
    *,
    number_format: NumberFormat,
) -> str | None:
    """Why the kernel cannot multiply these arrays; None if it can."""
    _, _, num_bytes, out_features = numbers.shape
    tile_rows = x.shape[0] // tile_experts.shape[0]
    if tile_rows not in ROWS_OF_CTA and tile_rows % max(ROWS_OF_CTA):
        return f"a tile has {tile_rows} rows, not one of {ROWS_OF_CTA} or a multiple of the last"
    num_ctas = x.shape[0] // min(tile_rows, max(ROWS_OF_CTA))
    if num_ctas > MAX_GRID_YZ or max(x.size, x.shape[0] * out_features) > INT32_MAX:
        return f"indices are int32, and the grid has at most {MAX_GRID_YZ} tiles"
    return misfit_of_matrix(x.dtype, num_bytes, out_features, number_format)


def scaled_grouped_matmul_mosaic_gpu(
    x: jax.Array,  # bf16[num_tiles * tile_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_experts, num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_experts, num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_experts, num_groups, out_features]
    tile_experts: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    number_format: NumberFormat,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:  # bf16[num_tiles * tile_rows, out_features]
    """See `api.scaled_grouped_matmul`."""
    num_experts, out_features = numbers.shape[0], numbers.shape[-1]
    tile_rows = x.shape[0] // tile_experts.shape[0]
    plan = make_plan(min(tile_rows, max(ROWS_OF_CTA)), numbers, zeros, number_format)
    multiply = plgpu.kernel(
        functools.partial(_kernel_body, plan=plan, num_experts=num_experts, tile_rows=tile_rows),
        out_type=jax.ShapeDtypeStruct((x.shape[0], out_features), x.dtype),
        scratch_types=[
            plgpu.SMEM((plan.num_rows, plan.num_columns), x.dtype, transforms=swizzled(64, 2)),
            *stage_types(plan),
        ],
        # The last axis runs fastest, so the CTAs of the same rows, with all columns, run together.
        grid=(x.shape[0] // plan.num_rows, out_features // plan.num_columns),
        grid_names=("rows", "column"),
        num_threads=2,
        thread_name="role",
        kernel_name="scaled_grouped_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    matrices = matrix_operands(numbers, scales, zeros, number_format)
    return multiply(x, tile_experts, tile_sizes, *matrices)


def _kernel_body(
    x: jax.Ref,
    tile_experts: jax.Ref,
    tile_sizes: jax.Ref,
    *refs: jax.Ref,
    plan: Plan,
    num_experts: int,
    tile_rows: int,
) -> None:
    num_arrays = 2 + plan.has_zeros
    matrices = matrix_of(refs[:num_arrays])
    out, staged, *others = refs[num_arrays:]
    stages = stages_of(others)
    cta, role = lax.axis_index("rows"), lax.axis_index("role")
    ctas_per_tile = tile_rows // plan.num_rows
    tile, first_row = cta // ctas_per_tile, cta % ctas_per_tile * plan.num_rows
    expert = tile_experts[tile]
    has_rows = (expert < num_experts) & (tile_sizes[tile] > first_row)
    rows = pl.ds(cta * plan.num_rows, plan.num_rows)
    columns = pl.ds(lax.axis_index("column") * plan.num_columns, plan.num_columns)
    part = Part((expert,), rows, columns, 0, plan.num_pieces)

    @pl.when(has_rows & (role == COPY))
    def _() -> None:
        copy_pieces(x, matrices, stages, plan, part)

    @pl.when(has_rows & (role == COMPUTE))
    def _() -> None:
        total = multiply_pieces(stages, plan, part).astype(staged.dtype)
        staged.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)
