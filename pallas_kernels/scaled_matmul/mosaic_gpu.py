"""Mosaic GPU body of `scaled_matmul` on Hopper, for the few rows of decode steps.

A CTA computes some columns of the result from a part of the inputs, one piece of the matrix per
turn. A piece is the stored bytes of up to 64 rows. One warpgroup copies pieces to shared memory, up
to `_NUM_STAGES` ahead, so device memory is read once, in the stored width. The other warpgroup
widens a piece in its registers, writes the floats to shared memory, and multiplies them. wgmma
cannot read the numbers from registers, because a byte's neighbors belong to other outputs.

Every int8, int4 and e4m3 is exact in bfloat16. The scales multiply the float32 sums of a turn.

wgmma multiplies 64 rows at a time, so the columns of the matrix are its rows, and the rows of x are
its columns. The sums over the parts of the inputs are added outside of the kernel, in an order that
depends on the shapes of the matrix only.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_layout import INT32_MAX
from pallas_kernels.number_format import MIDDLE, NumberFormat, has_pairs, scales_as_float32
from pallas_kernels.tma_boxes import MAX_GRID_YZ

# x is padded to the first of these numbers of rows.
_NUM_ROWS = (8, 16, 32, 64)
# Stored rows of a piece: the first of these numbers that divides the stored rows of a group.
_PIECE_ROWS = (64, 32, 16)
_COLUMNS = (128, 64)
# With more rows of x, the sums of 128 columns would take more than half of the registers.
_MAX_ROWS_OF_WIDE = 32
# With more rows, two CTAs of four stages would not fit an SM.
_NUM_STAGES, _NUM_STAGES_OF_MANY_ROWS = 4, 3
# Guesses: two CTAs for each of an H200's 132 SMs, and the fewest turns that are worth a CTA.
_WANTED_CTAS = 264
_MIN_TURNS = 4
_BYTES_PER_THREAD = 8  # numbers that a thread widens together
_COMPUTE, _COPY = 0, 1  # the warpgroups
_STORED_DTYPES = {"int4": jnp.int8, "int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The sizes of a call."""

    num_rows: int  # of x, padded
    num_columns: int  # of a CTA
    num_stages: int
    piece_rows: int
    pieces_per_group: int
    num_pieces: int  # of the matrix
    num_parts: int
    has_pairs: bool
    has_zeros: bool

    @property
    def num_inputs(self) -> int:
        """Inputs of one product: 64 or 32, a row of the swizzle of both operands."""
        return self.piece_rows * (2 if self.has_pairs and self.piece_rows < 64 else 1)

    @property
    def num_products(self) -> int:
        """Products per piece: two if inputs in low bits and in high bits may lie apart in x."""
        return self.piece_rows * (2 if self.has_pairs else 1) // self.num_inputs


class _Refs(NamedTuple):
    """The kernel's arrays and barriers. Up to `out`, they are in GMEM, the others in SMEM."""

    x: jax.Ref  # bf16[num_rows, in_features]
    numbers: jax.Ref  # i8 or e4m3[num_groups, bytes_per_group, out_features]
    scales: jax.Ref  # f32[num_groups, out_features]
    zeros: jax.Ref | None  # i8[num_groups, out_features]
    out: jax.Ref  # f32[num_parts, num_rows, out_features]
    x_stages: jax.Ref  # bf16[num_stages, num_products, num_rows, num_inputs]
    numbers_stages: jax.Ref  # i8 or e4m3[num_stages, piece_rows, num_columns]
    scales_stages: jax.Ref  # f32[num_stages, num_columns]
    zeros_stages: jax.Ref | None  # i8[num_stages, num_columns]
    widened: jax.Ref  # bf16[num_products, num_inputs, num_columns]
    staged: jax.Ref  # f32[num_rows, num_columns]
    landed: jax.Ref  # a barrier for each stage: all of its copies have arrived
    free: jax.Ref  # a barrier for each stage: its piece has been multiplied


def misfit(
    x: jax.Array,
    numbers: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    number_format: NumberFormat,
) -> str | None:
    """Why the kernel cannot multiply these arrays; None if it can."""
    num_groups, num_bytes, out_features = numbers.shape
    if x.dtype != jnp.bfloat16:
        return f"the kernel multiplies bfloat16, not {x.dtype}"
    if number_format not in _STORED_DTYPES:
        return f"the kernel widens {', '.join(_STORED_DTYPES)}, not {number_format}"
    if x.shape[0] > max(_NUM_ROWS):
        return f"x has more than {max(_NUM_ROWS)} rows"  # one log line for all numbers of rows
    piece_rows = _piece_rows(num_bytes)
    if not has_pairs(number_format) and (piece_rows is None or piece_rows < 32):
        return f"a group has {num_bytes} inputs, which is not a multiple of 32"
    if has_pairs(number_format) and (piece_rows is None or piece_rows < min(num_bytes, 64)):
        return f"a group has {2 * num_bytes} inputs, which is not 32, 64 or a multiple of 128"
    if out_features % min(_COLUMNS):
        return f"the matrix has {out_features} outputs, which is not a multiple of {min(_COLUMNS)}"
    if out_features // min(_COLUMNS) > MAX_GRID_YZ or max(_NUM_ROWS) * out_features > INT32_MAX:
        return f"indices are int32, and the grid has at most {MAX_GRID_YZ} pieces of columns"
    return None


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
    plan = _make_plan(x, numbers, zeros, number_format)
    arrays = [
        jnp.pad(x, ((0, plan.num_rows - x.shape[0]), (0, 0))),
        _as_dtype(numbers, _STORED_DTYPES[number_format]),
        scales_as_float32(scales),
    ]
    if zeros is not None:
        arrays.append(_as_dtype(zeros, jnp.int8))
    multiply = plgpu.kernel(
        functools.partial(_kernel_body, plan=plan, number_format=number_format),
        out_type=jax.ShapeDtypeStruct((plan.num_parts, plan.num_rows, out_features), jnp.float32),
        scratch_types=_scratch_types(plan, arrays[1].dtype),
        grid=(plan.num_parts, out_features // plan.num_columns),
        grid_names=("part", "column"),
        num_threads=2,
        thread_name="role",
        kernel_name="scaled_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    return multiply(*arrays).sum(axis=0)[: x.shape[0]]


def _make_plan(
    x: jax.Array, numbers: jax.Array, zeros: jax.Array | None, number_format: NumberFormat
) -> _Plan:
    num_groups, num_bytes, out_features = numbers.shape
    num_rows = next(num_rows for num_rows in _NUM_ROWS if num_rows >= x.shape[0])
    is_wide = num_rows <= _MAX_ROWS_OF_WIDE and out_features % max(_COLUMNS) == 0
    num_columns = max(_COLUMNS) if is_wide else min(_COLUMNS)
    piece_rows = _piece_rows(num_bytes)
    num_pieces = num_groups * num_bytes // piece_rows
    num_ctas = out_features // num_columns
    num_parts = max(1, min(_WANTED_CTAS // num_ctas, num_pieces // _MIN_TURNS))
    return _Plan(
        num_rows=num_rows,
        num_columns=num_columns,
        num_stages=_NUM_STAGES if num_rows <= _MAX_ROWS_OF_WIDE else _NUM_STAGES_OF_MANY_ROWS,
        piece_rows=piece_rows,
        pieces_per_group=num_bytes // piece_rows,
        num_pieces=num_pieces,
        num_parts=num_parts,
        has_pairs=has_pairs(number_format),
        has_zeros=zeros is not None,
    )


def _piece_rows(num_bytes: int) -> int | None:
    return next((rows for rows in _PIECE_ROWS if num_bytes % rows == 0), None)


def _as_dtype(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _scratch_types(plan: _Plan, stored_dtype: jnp.dtype) -> list[object]:
    """In the order of `_Refs`."""

    def swizzled(columns: int, num_bytes: int) -> tuple[object, ...]:
        return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * num_bytes)

    operand = swizzled(plan.num_inputs, 2)
    x_shape = (plan.num_stages, plan.num_products, plan.num_rows, plan.num_inputs)
    widened_shape = (plan.num_products, plan.num_inputs, plan.num_columns)
    of_zeros = [plgpu.SMEM((plan.num_stages, plan.num_columns), jnp.int8)] if plan.has_zeros else []
    return [
        plgpu.SMEM(x_shape, jnp.bfloat16, transforms=operand),
        plgpu.SMEM((plan.num_stages, plan.piece_rows, plan.num_columns), stored_dtype),
        plgpu.SMEM((plan.num_stages, plan.num_columns), jnp.float32),
        *of_zeros,
        plgpu.SMEM(widened_shape, jnp.bfloat16, transforms=operand),
        plgpu.SMEM((plan.num_rows, plan.num_columns), jnp.float32, transforms=swizzled(32, 4)),
        plgpu.Barrier(
            num_arrivals=2 + plan.has_zeros + plan.num_products, num_barriers=plan.num_stages
        ),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.num_stages),
    ]


def _kernel_body(*refs: jax.Ref, plan: _Plan, number_format: NumberFormat) -> None:
    if plan.has_zeros:
        refs = _Refs(*refs)
    else:
        refs = _Refs(*refs[:3], None, *refs[3:7], None, *refs[7:])
    part = lax.axis_index("part")
    role = lax.axis_index("role")
    columns = pl.ds(lax.axis_index("column") * plan.num_columns, plan.num_columns)
    first = part * plan.num_pieces // plan.num_parts
    num_turns = (part + 1) * plan.num_pieces // plan.num_parts - first

    @pl.when(role == _COPY)
    def _() -> None:
        @pl.loop(0, num_turns)
        def _(turn: jax.Array) -> None:
            stage = lax.rem(turn, jnp.int32(plan.num_stages))

            @pl.when(turn >= plan.num_stages)
            def _() -> None:
                plgpu.barrier_wait(refs.free.at[stage])

            _copy_piece(refs, plan, first + turn, columns, stage)

    @pl.when(role == _COMPUTE)
    def _() -> None:
        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            stage = lax.rem(turn, jnp.int32(plan.num_stages))
            plgpu.barrier_wait(refs.landed.at[stage])
            # The scales of the columns, which are the rows of the transposed sums.
            scales = plgpu.layout_cast(
                refs.scales_stages.at[stage][...], plgpu.Layout.WGMMA.reduce(1)
            )
            _widen(refs, plan, number_format, stage)
            plgpu.commit_smem()
            sums = _multiply(refs, plan, stage)

            # No later piece waits for the stages of the last pieces.
            @pl.when(turn + plan.num_stages < num_turns)
            def _() -> None:
                plgpu.barrier_arrive(refs.free.at[stage])

            return total + sums * lax.broadcast_in_dim(scales, sums.shape, [0])

        shape = (plan.num_columns, plan.num_rows)
        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, num_turns, add, nothing)
        refs.staged.T[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.staged, refs.out.at[part, :, columns])
        plgpu.wait_smem_to_gmem(0)


def _copy_piece(
    refs: _Refs, plan: _Plan, piece: jax.Array, columns: pl.Slice, stage: jax.Array
) -> None:
    """Starts the copies of a piece, and of what is multiplied with it, to a stage."""
    landed = refs.landed.at[stage]
    group = lax.div(piece, jnp.int32(plan.pieces_per_group))
    piece_of_group = lax.rem(piece, jnp.int32(plan.pieces_per_group))
    plgpu.copy_gmem_to_smem(
        refs.numbers.at[group, pl.ds(piece_of_group * plan.piece_rows, plan.piece_rows), columns],
        *(refs.numbers_stages.at[stage], landed),
    )
    plgpu.copy_gmem_to_smem(refs.scales.at[group, columns], refs.scales_stages.at[stage], landed)
    if plan.has_zeros:
        plgpu.copy_gmem_to_smem(refs.zeros.at[group, columns], refs.zeros_stages.at[stage], landed)
    # In groups of several pieces, the inputs of the two products are half a group apart.
    group_start = group * (plan.pieces_per_group * plan.num_products * plan.num_inputs)
    for product in range(plan.num_products):
        start = group_start + (product * plan.pieces_per_group + piece_of_group) * plan.num_inputs
        plgpu.copy_gmem_to_smem(
            refs.x.at[:, pl.ds(start, plan.num_inputs)], refs.x_stages.at[stage, product], landed
        )


def _widen(refs: _Refs, plan: _Plan, number_format: NumberFormat, stage: jax.Array) -> None:
    """Writes `number - zero` of all numbers of a stage to `refs.widened`."""
    layout = _layout_of_bytes(plan)
    numbers = plgpu.layout_cast(refs.numbers_stages.at[stage][...], layout)
    if number_format == "e4m3":
        # Not every JAX widens it to bfloat16 at once. Float16 has all of its numbers.
        refs.widened[0] = numbers.astype(jnp.float16).astype(jnp.bfloat16)
        return
    if number_format == "int8":
        refs.widened[0] = numbers.astype(jnp.bfloat16)
        return
    # Registers of bytes have no shifts. With its highest bit flipped, the high half of a byte is
    # 16 * (number - 8).
    low = (numbers & jnp.int8(15)).astype(jnp.bfloat16)
    high = ((numbers ^ jnp.int8(-128)) & jnp.int8(-16)).astype(jnp.bfloat16)
    high *= jnp.bfloat16(1 / 16)
    if plan.has_zeros:
        zeros = plgpu.layout_cast(refs.zeros_stages.at[stage][...], layout.reduce(0))
        zeros = lax.broadcast_in_dim(zeros.astype(jnp.bfloat16), low.shape, [1])
        low -= zeros
        high -= zeros - jnp.bfloat16(MIDDLE)
    else:
        low -= jnp.bfloat16(MIDDLE)
    if plan.num_products == 2:
        refs.widened[0], refs.widened[1] = low, high
    else:
        refs.widened[0, : plan.piece_rows] = low
        refs.widened[0, plan.piece_rows :] = high


def _layout_of_bytes(plan: _Plan) -> object:
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
    refs: _Refs, plan: _Plan, stage: jax.Array
) -> jax.Array:  # f32[num_columns, num_rows]
    """The transposed product of the widened piece and the inputs of a stage."""

    def run(sums: jax.Ref) -> jax.Array:
        for product in range(plan.num_products):
            x = refs.x_stages.at[stage, product]
            plgpu.wgmma(sums, refs.widened.at[product].T, x.T)
        return sums[...]

    shape = (plan.num_columns, plan.num_rows)
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
