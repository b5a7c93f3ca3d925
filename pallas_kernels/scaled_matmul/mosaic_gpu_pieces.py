"""Pieces of a matrix of small numbers in a Mosaic GPU kernel on Hopper, and their products.

A CTA computes some columns of a product with up to 64 rows, one piece of the matrix per turn. A
piece is the stored bytes of up to 64 rows of the matrix. One warpgroup copies pieces to shared
memory, up to `Plan.num_stages` ahead, so device memory is read in the stored width. The other
warpgroup widens a piece in its registers, writes the floats to shared memory, and multiplies them.
wgmma cannot read the numbers from registers, because a byte's neighbors belong to other outputs.

All numbers of these formats are exact in bfloat16. The scales multiply the float32 sums of a turn.

The kernel computes the transposed product, because wgmma multiplies 64 rows at a time, and x often
has fewer. So the columns of the matrix are the rows of wgmma, and the rows of x are its columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.number_format import MIDDLE, NumberFormat, has_pairs, scales_as_float32
from pallas_kernels.tma_boxes import MAX_GRID_YZ

# A CTA pads the rows of x to the first of these numbers that is large enough.
ROWS_OF_CTA = (8, 16, 32, 64)
# Stored rows of a piece: the first of these numbers that divides the stored rows of a group.
_PIECE_ROWS = (64, 32, 16)
_COLUMNS = (128, 64)
# With more rows of x, the sums of 128 columns would take more than half of the registers.
_MAX_ROWS_OF_WIDE = 32
# With more rows, two CTAs of four stages would not fit an SM.
_NUM_STAGES, _NUM_STAGES_OF_MANY_ROWS = 4, 3
_BYTES_PER_THREAD = 8  # neighbors that a thread widens together
COMPUTE, COPY = 0, 1  # the warpgroups
_STORED_DTYPES = {
    "int4": jnp.int8,
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e2m1": jnp.int8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of a call."""

    num_rows: int  # of x in a CTA, padded
    num_columns: int  # of a CTA
    num_stages: int
    piece_rows: int
    pieces_per_group: int
    num_pieces: int  # of a matrix
    number_format: NumberFormat
    has_zeros: bool

    @property
    def num_inputs(self) -> int:
        """Inputs of one product: 64 or 32, a row of the swizzle of both operands."""
        is_doubled = has_pairs(self.number_format) and self.piece_rows < 64
        return self.piece_rows * (2 if is_doubled else 1)

    @property
    def num_products(self) -> int:
        """Products per piece: two if inputs in low bits and in high bits may lie apart in x."""
        return self.piece_rows * (2 if has_pairs(self.number_format) else 1) // self.num_inputs


class Matrix(NamedTuple):
    """A matrix in GMEM, or a stack of matrices, which have one axis more in front."""

    numbers: jax.Ref  # i8 or e4m3[num_groups, bytes_per_group, out_features]
    scales: jax.Ref  # f32[num_groups, out_features]
    zeros: jax.Ref | None  # i8[num_groups, out_features]


class Stages(NamedTuple):
    """Scratch memory of a CTA, and its barriers."""

    x: jax.Ref  # bf16[num_stages, num_products, num_rows, num_inputs]
    numbers: jax.Ref  # i8 or e4m3[num_stages, piece_rows, num_columns]
    scales: jax.Ref  # f32[num_stages, num_columns]
    zeros: jax.Ref | None  # i8[num_stages, num_columns]
    widened: jax.Ref  # bf16[num_products, num_inputs, num_columns]
    landed: jax.Ref  # a barrier for each stage: all of its copies have arrived
    free: jax.Ref  # a barrier for each stage: its piece has been multiplied


class Part(NamedTuple):
    """What a CTA multiplies."""

    matrix: tuple[jax.Array, ...]  # the index of a matrix in a stack; empty for one matrix
    rows: pl.Slice | slice  # of x
    columns: pl.Slice
    first_piece: jax.Array | int
    num_turns: jax.Array | int


def misfit_of_matrix(
    dtype: jnp.dtype, num_bytes: int, out_features: int, number_format: NumberFormat
) -> str | None:
    """Why a kernel cannot multiply rows with a matrix; None if it can.

    Args:
        dtype: Of the rows.
        num_bytes: Of a group of one output.
    """
    if dtype != jnp.bfloat16:
        return f"the kernel multiplies bfloat16, not {dtype}"
    if number_format not in _STORED_DTYPES:
        return f"the kernel widens {', '.join(_STORED_DTYPES)}, not {number_format}"
    piece_rows = _piece_rows(num_bytes)
    if not has_pairs(number_format) and (piece_rows is None or piece_rows < 32):
        return f"a group has {num_bytes} inputs, which is not a multiple of 32"
    if has_pairs(number_format) and (piece_rows is None or piece_rows < min(num_bytes, 64)):
        return f"a group has {2 * num_bytes} inputs, which is not 32, 64 or a multiple of 128"
    if out_features % min(_COLUMNS):
        return f"the matrix has {out_features} outputs, which is not a multiple of {min(_COLUMNS)}"
    if out_features // min(_COLUMNS) > MAX_GRID_YZ:
        return f"the grid has at most {MAX_GRID_YZ} pieces of columns"
    return None


def make_plan(
    num_rows: int, numbers: jax.Array, zeros: jax.Array | None, number_format: NumberFormat
) -> Plan:
    """Chooses the sizes for products of up to `num_rows` rows with a matrix or one of a stack."""
    num_groups, num_bytes, out_features = numbers.shape[-3:]
    num_rows = next(rows for rows in ROWS_OF_CTA if rows >= num_rows)
    is_wide = num_rows <= _MAX_ROWS_OF_WIDE and out_features % max(_COLUMNS) == 0
    piece_rows = _piece_rows(num_bytes)
    return Plan(
        num_rows=num_rows,
        num_columns=max(_COLUMNS) if is_wide else min(_COLUMNS),
        num_stages=_NUM_STAGES if num_rows <= _MAX_ROWS_OF_WIDE else _NUM_STAGES_OF_MANY_ROWS,
        piece_rows=piece_rows,
        pieces_per_group=num_bytes // piece_rows,
        num_pieces=num_groups * num_bytes // piece_rows,
        number_format=number_format,
        has_zeros=zeros is not None,
    )


def _piece_rows(num_bytes: int) -> int | None:
    return next((rows for rows in _PIECE_ROWS if num_bytes % rows == 0), None)


def matrix_operands(
    numbers: jax.Array, scales: jax.Array, zeros: jax.Array | None, number_format: NumberFormat
) -> list[jax.Array]:
    """The arrays of a matrix or a stack as the kernel takes them, in the order of `Matrix`."""
    operands = [_as_dtype(numbers, _STORED_DTYPES[number_format]), scales_as_float32(scales)]
    return operands if zeros is None else [*operands, _as_dtype(zeros, jnp.int8)]


def _as_dtype(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def swizzled(columns: int, num_bytes: int) -> tuple[object, ...]:
    """The transforms of an array in SMEM whose numbers have `num_bytes`."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * num_bytes)


def stage_types(plan: Plan) -> list[object]:
    """The scratch types of `Stages`, in order."""
    operand = swizzled(plan.num_inputs, 2)
    x_shape = (plan.num_stages, plan.num_products, plan.num_rows, plan.num_inputs)
    numbers_shape = (plan.num_stages, plan.piece_rows, plan.num_columns)
    widened_shape = (plan.num_products, plan.num_inputs, plan.num_columns)
    of_zeros = [plgpu.SMEM((plan.num_stages, plan.num_columns), jnp.int8)] if plan.has_zeros else []
    return [
        plgpu.SMEM(x_shape, jnp.bfloat16, transforms=operand),
        plgpu.SMEM(numbers_shape, _STORED_DTYPES[plan.number_format]),
        plgpu.SMEM((plan.num_stages, plan.num_columns), jnp.float32),
        *of_zeros,
        plgpu.SMEM(widened_shape, jnp.bfloat16, transforms=operand),
        plgpu.Barrier(
            num_arrivals=2 + plan.has_zeros + plan.num_products, num_barriers=plan.num_stages
        ),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.num_stages),
    ]


def matrix_of(refs: Sequence[jax.Ref]) -> Matrix:
    """The refs of `matrix_operands`."""
    return Matrix(*refs) if len(refs) == len(Matrix._fields) else Matrix(*refs, None)


def stages_of(refs: Sequence[jax.Ref]) -> Stages:
    """The refs of `stage_types`."""
    return Stages(*refs) if len(refs) == len(Stages._fields) else Stages(*refs[:3], None, *refs[3:])


def copy_pieces(x: jax.Ref, matrix: Matrix, stages: Stages, plan: Plan, part: Part) -> None:
    """Copies one piece after the other to the stages; for the warpgroup `COPY`."""

    @pl.loop(0, part.num_turns)
    def _(turn: jax.Array) -> None:
        stage = lax.rem(turn, jnp.int32(plan.num_stages))

        @pl.when(turn >= plan.num_stages)
        def _() -> None:
            plgpu.barrier_wait(stages.free.at[stage])

        _copy_piece(x, matrix, stages, plan, part, part.first_piece + turn, stage)


def multiply_pieces(
    stages: Stages, plan: Plan, part: Part
) -> jax.Array:  # f32[num_columns, num_rows]
    """The transposed product of the part; for the warpgroup `COMPUTE`."""

    def add(turn: jax.Array, total: jax.Array) -> jax.Array:
        stage = lax.rem(turn, jnp.int32(plan.num_stages))
        plgpu.barrier_wait(stages.landed.at[stage])
        # The scales of the columns, which are the rows of the transposed sums.
        scales = plgpu.layout_cast(stages.scales.at[stage][...], plgpu.Layout.WGMMA.reduce(1))
        _widen(stages, plan, stage)
        plgpu.commit_smem()
        sums = _multiply(stages, plan, stage)

        # No later piece waits for the stages of the last pieces.
        @pl.when(turn + plan.num_stages < part.num_turns)
        def _() -> None:
            plgpu.barrier_arrive(stages.free.at[stage])

        return total + sums * lax.broadcast_in_dim(scales, sums.shape, [0])

    shape = (plan.num_columns, plan.num_rows)
    nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, part.num_turns, add, nothing)


def _copy_piece(
    x: jax.Ref,
    matrix: Matrix,
    stages: Stages,
    plan: Plan,
    part: Part,
    piece: jax.Array,
    stage: jax.Array,
) -> None:
    """Starts the copies of a piece, its scales and zero points, and its inputs, to a stage."""
    landed = stages.landed.at[stage]
    group = lax.div(piece, jnp.int32(plan.pieces_per_group))
    piece_of_group = lax.rem(piece, jnp.int32(plan.pieces_per_group))
    stored_rows = pl.ds(piece_of_group * plan.piece_rows, plan.piece_rows)
    place = (*part.matrix, group)
    plgpu.copy_gmem_to_smem(
        matrix.numbers.at[(*place, stored_rows, part.columns)], stages.numbers.at[stage], landed
    )
    plgpu.copy_gmem_to_smem(
        matrix.scales.at[(*place, part.columns)], stages.scales.at[stage], landed
    )
    if plan.has_zeros:
        plgpu.copy_gmem_to_smem(
            matrix.zeros.at[(*place, part.columns)], stages.zeros.at[stage], landed
        )
    # In groups of several pieces, the inputs of the two products are half a group apart.
    group_start = group * (plan.pieces_per_group * plan.num_products * plan.num_inputs)
    for product in range(plan.num_products):
        start = group_start + (product * plan.pieces_per_group + piece_of_group) * plan.num_inputs
        plgpu.copy_gmem_to_smem(
            x.at[part.rows, pl.ds(start, plan.num_inputs)], stages.x.at[stage, product], landed
        )


def _widen(stages: Stages, plan: Plan, stage: jax.Array) -> None:
    """Writes `number - zero` of all numbers of a stage to `stages.widened`."""
    layout = _layout_of_bytes(plan)
    numbers = plgpu.layout_cast(stages.numbers.at[stage][...], layout)
    if plan.number_format == "e4m3":
        # Some versions of JAX cannot widen e4m3 to bfloat16. Float16 has all numbers of e4m3.
        stages.widened[0] = numbers.astype(jnp.float16).astype(jnp.bfloat16)
        return
    if plan.number_format == "int8":
        stages.widened[0] = numbers.astype(jnp.bfloat16)
        return
    # Bytes in registers cannot be shifted, so the high bits are divided.
    if plan.number_format == "e2m1":
        low = _from_e2m1(numbers & jnp.int8(7), numbers & jnp.int8(8), 1)
        high = _from_e2m1(numbers & jnp.int8(0x70), numbers & jnp.int8(-128), -16)
        _store_pairs(stages, plan, low, high)
        return
    # With its highest bit flipped, the high half of a byte is 16 * (number - 8).
    low = (numbers & jnp.int8(15)).astype(jnp.bfloat16)
    high = ((numbers ^ jnp.int8(-128)) & jnp.int8(-16)).astype(jnp.bfloat16)
    high *= jnp.bfloat16(1 / 16)
    if plan.has_zeros:
        zeros = plgpu.layout_cast(stages.zeros.at[stage][...], layout.reduce(0))
        zeros = lax.broadcast_in_dim(zeros.astype(jnp.bfloat16), low.shape, [1])
        low -= zeros
        high -= zeros - jnp.bfloat16(MIDDLE)
    else:
        low -= jnp.bfloat16(MIDDLE)
    _store_pairs(stages, plan, low, high)


def _from_e2m1(
    magnitudes: jax.Array,  # i8, abs(unit) times the three bits
    signs: jax.Array,  # i8, 8 * unit for negative numbers, otherwise 0
    unit: int,
) -> jax.Array:  # bf16
    """Widens e2m1. Twice the magnitudes are 0, 1, 2, 3, 4, 6, 8 and 12 for the bits 0 to 7."""
    bits = magnitudes.astype(jnp.bfloat16) * jnp.bfloat16(1 / abs(unit))
    zero = jnp.bfloat16(0)
    above_4 = jnp.maximum(bits - jnp.bfloat16(4), zero)
    above_6 = jnp.maximum(bits - jnp.bfloat16(6), zero)
    half = jnp.bfloat16(0.5) - signs.astype(jnp.bfloat16) * jnp.bfloat16(1 / (8 * unit))
    return (bits + above_4 + above_6 + above_6) * half


def _store_pairs(stages: Stages, plan: Plan, low: jax.Array, high: jax.Array) -> None:
    """Writes the numbers in the low and the high bits of a piece to `stages.widened`."""
    if plan.num_products == 2:
        stages.widened[0], stages.widened[1] = low, high
    else:
        stages.widened[0, : plan.piece_rows] = low
        stages.widened[0, plan.piece_rows :] = high


def _layout_of_bytes(plan: Plan) -> object:
    """The registers of a piece: eight neighboring columns per thread.

    Eight threads then write 128 neighboring bytes of a row of the swizzle, or of two rows if a row
    has 64 bytes. So no two of them write to the same bank.
    """
    columns_per_row = plan.num_columns // _BYTES_PER_THREAD
    rows_per_warp = 32 // columns_per_row
    warp = (rows_per_warp, plan.num_columns)
    all_warps = (4 * rows_per_warp, plan.num_columns)
    if plan.num_inputs == 64:
        tiling = plgpu.Tiling((all_warps, warp, (_BYTES_PER_THREAD,)))
        warp_dims, lane_dims = (-5,), (-3, -2)
    else:
        swizzled = (rows_per_warp, plan.num_inputs)
        tiling = plgpu.Tiling((all_warps, warp, swizzled, (_BYTES_PER_THREAD,)))
        warp_dims, lane_dims = (-7,), (-4, -3, -2)
    return plgpu.Layout.TILED(tiling, warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def _multiply(
    stages: Stages, plan: Plan, stage: jax.Array
) -> jax.Array:  # f32[num_columns, num_rows]
    """The transposed product of the widened piece and the inputs of a stage."""

    def run(sums: jax.Ref) -> jax.Array:
        for product in range(plan.num_products):
            x = stages.x.at[stage, product]
            plgpu.wgmma(sums, stages.widened.at[product].T, x.T)
        return sums[...]

    shape = (plan.num_columns, plan.num_rows)
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
