"""Mosaic GPU body of `scaled_matmul` on Hopper, for the few rows of decode steps.

A CTA computes some columns of the result from a part of the inputs, so device memory is read once
(`mosaic_gpu_pieces.py`). The sums over the parts of the inputs are added outside of the kernel, in
an order that depends on the shapes of the matrix only.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
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

# Guesses: two CTAs for each of an H200's 132 SMs, and the fewest turns that are worth a CTA.
_WANTED_CTAS = 264
_MIN_TURNS = 4


def misfit(
    x: jax.Array,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    number_format: NumberFormat,
) -> str | None:
    """Why the kernel cannot multiply these arrays; None if it can."""
    _, num_bytes, out_features = numbers.shape
    if x.shape[0] > max(ROWS_OF_CTA):
        return f"x has more than {max(ROWS_OF_CTA)} rows"  # one log line for all numbers of rows
    if max(ROWS_OF_CTA) * out_features > INT32_MAX:
        return "indices are int32"
    return misfit_of_matrix(x.dtype, num_bytes, out_features, number_format)


def scaled_matmul_mosaic_gpu(
    x: jax.Array,  # bf16[num_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_groups, out_features]
    *,
    number_format: NumberFormat,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:  # f32[num_rows, out_features]
    """See `api.scaled_matmul`."""
    out_features = numbers.shape[2]
    plan = make_plan(x.shape[0], numbers, zeros, number_format)
    num_ctas = out_features // plan.num_columns
    num_parts = max(1, min(_WANTED_CTAS // num_ctas, plan.num_pieces // _MIN_TURNS))
    multiply = plgpu.kernel(
        functools.partial(_kernel_body, plan=plan, num_parts=num_parts),
        out_type=jax.ShapeDtypeStruct((num_parts, plan.num_rows, out_features), jnp.float32),
        scratch_types=[
            plgpu.SMEM((plan.num_rows, plan.num_columns), jnp.float32, transforms=swizzled(32, 4)),
            *stage_types(plan),
        ],
        grid=(num_parts, num_ctas),
        grid_names=("part", "column"),
        num_threads=2,
        thread_name="role",
        kernel_name="scaled_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    padded = jnp.pad(x, ((0, plan.num_rows - x.shape[0]), (0, 0)))
    parts = multiply(padded, *matrix_operands(numbers, scales, zeros, number_format))
    return parts.sum(axis=0)[: x.shape[0]]


def _kernel_body(x: jax.Ref, *refs: jax.Ref, plan: Plan, num_parts: int) -> None:
    num_arrays = 2 + plan.has_zeros
    matrix = matrix_of(refs[:num_arrays])
    out, staged, *others = refs[num_arrays:]
    stages = stages_of(others)
    part_idx, role = lax.axis_index("part"), lax.axis_index("role")
    columns = pl.ds(lax.axis_index("column") * plan.num_columns, plan.num_columns)
    first = part_idx * plan.num_pieces // num_parts
    end = (part_idx + 1) * plan.num_pieces // num_parts
    part = Part((), slice(None), columns, first, end - first)

    @pl.when(role == COPY)
    def _() -> None:
        copy_pieces(x, matrix, stages, plan, part)

    @pl.when(role == COMPUTE)
    def _() -> None:
        total = multiply_pieces(stages, plan, part)
        staged.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[part_idx, :, columns])
        plgpu.wait_smem_to_gmem(0)
