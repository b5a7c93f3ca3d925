"""Mosaic GPU body of `grouped_matmul` on Hopper: one CTA per tile of rows and piece of columns.

One warpgroup copies pieces of x and of the tile's matrix to shared memory, up to `_NUM_STAGES`
pieces ahead. The other warpgroup multiplies them. wgmma multiplies 64 rows at a time. If a tile has
fewer than 64 rows, the kernel computes the transposed product: the columns of the matrix are
wgmma's rows, and the rows of the tile are its columns. CTAs of tiles without rows end at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_layout import INT32_MAX
from pallas_kernels.tma_boxes import MAX_GRID_YZ

# Columns of the result that one CTA computes: the first number that divides the matrix's columns.
# With more columns per CTA, the same rows of x are copied less often.
_COLUMNS = (128, 64)
_FEATURES = 64  # input features per iteration of the loop: 128 bytes, a row of the swizzle
_NUM_STAGES = 4
_TILE_ROWS = (8, 16, 32, 64, 128)
_COMPUTE, _COPY = 0, 1  # the warpgroups


class _Refs(NamedTuple):
    """The kernel's arrays and barriers. The first four are in GMEM, the others in SMEM."""

    x: jax.Ref  # f[num_tiles * tile_rows, in_features]
    weights: jax.Ref  # f[num_groups, in_features, out_features]
    tile_groups: jax.Ref  # i32[num_tiles]
    out: jax.Ref  # f[num_tiles * tile_rows, out_features]
    x_stages: jax.Ref  # f[_NUM_STAGES, tile_rows, _FEATURES]
    weights_stages: jax.Ref  # f[_NUM_STAGES, _FEATURES, num_columns]
    staged: jax.Ref  # f[tile_rows, num_columns]
    landed: jax.Ref  # a barrier for each stage: both pieces have arrived
    free: jax.Ref  # a barrier for each stage: both pieces have been multiplied


def misfit(
    x: jax.Array,
    weights: jax.Array,
    tile_groups: jax.Array,
    tile_sizes: jax.Array,
    *,
    weights_dtype: jnp.dtype | None,
) -> str | None:
    """Why the kernel cannot multiply these arrays; None if it can."""
    tile_rows = x.shape[0] // tile_groups.shape[0]
    _, in_features, out_features = weights.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        return f"the kernel multiplies 16-bit floats, not {x.dtype} with {weights.dtype}"
    if tile_rows not in _TILE_ROWS:
        return f"a tile has {tile_rows} rows, not one of {_TILE_ROWS}"
    if in_features % _FEATURES or out_features % min(_COLUMNS):
        return (
            f"a matrix of {in_features} x {out_features} does not consist of pieces of "
            f"{_FEATURES} x {min(_COLUMNS)}"
        )
    if tile_groups.shape[0] > MAX_GRID_YZ or max(x.size, x.shape[0] * out_features) > INT32_MAX:
        return f"indices are int32, and the grid has at most {MAX_GRID_YZ} tiles"
    return None


def grouped_matmul_mosaic_gpu(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    weights: jax.Array,  # f[num_groups, in_features, out_features]
    tile_groups: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    weights_dtype: None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `api.grouped_matmul`."""
    (num_tiles,) = tile_groups.shape
    tile_rows = x.shape[0] // num_tiles
    num_groups, in_features, out_features = weights.shape
    num_columns = next(columns for columns in _COLUMNS if out_features % columns == 0)
    swizzled = (plgpu.TilingTransform((8, _FEATURES)), plgpu.SwizzleTransform(128))
    multiply = plgpu.kernel(
        functools.partial(
            _kernel_body,
            num_groups=num_groups,
            tile_rows=tile_rows,
            num_turns=in_features // _FEATURES,
        ),
        out_type=jax.ShapeDtypeStruct((x.shape[0], out_features), x.dtype),
        scratch_types=[
            plgpu.SMEM((_NUM_STAGES, tile_rows, _FEATURES), x.dtype, transforms=swizzled),
            plgpu.SMEM((_NUM_STAGES, _FEATURES, num_columns), x.dtype, transforms=swizzled),
            plgpu.SMEM((tile_rows, num_columns), x.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=_NUM_STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=_NUM_STAGES),
        ],
        # The last axis runs fastest, so the CTAs of one tile, with all its columns, run together.
        grid=(num_tiles, out_features // num_columns),
        grid_names=("tile", "column"),
        num_threads=2,
        thread_name="role",
        kernel_name="grouped_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    return multiply(x, weights, tile_groups)


def _kernel_body(*refs: jax.Ref, num_groups: int, tile_rows: int, num_turns: int) -> None:
    refs = _Refs(*refs)
    tile, column = lax.axis_index("tile"), lax.axis_index("column")
    role = lax.axis_index("role")
    group = refs.tile_groups[tile]
    rows = pl.ds(tile * tile_rows, tile_rows)
    num_columns = refs.staged.shape[1]
    columns = pl.ds(column * num_columns, num_columns)

    @pl.when((group < num_groups) & (role == _COPY))
    def _() -> None:
        @pl.loop(0, num_turns)
        def _(turn: jax.Array) -> None:
            stage = lax.rem(turn, jnp.int32(_NUM_STAGES))

            @pl.when(turn >= _NUM_STAGES)
            def _() -> None:
                plgpu.barrier_wait(refs.free.at[stage])

            features = pl.ds(turn * _FEATURES, _FEATURES)
            landed = refs.landed.at[stage]
            plgpu.copy_gmem_to_smem(refs.x.at[rows, features], refs.x_stages.at[stage], landed)
            plgpu.copy_gmem_to_smem(
                refs.weights.at[group, features, columns], refs.weights_stages.at[stage], landed
            )

    @pl.when((group < num_groups) & (role == _COMPUTE))
    def _() -> None:
        product = _multiply(refs, num_turns=num_turns).astype(refs.staged.dtype)
        if tile_rows < 64:
            refs.staged.T[...] = plgpu.layout_cast(product, plgpu.Layout.WGMMA)
        else:
            refs.staged[...] = product
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.staged, refs.out.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def _multiply(refs: _Refs, *, num_turns: int) -> jax.Array:
    """The tile's product f32[tile_rows, num_columns]; transposed if a tile has under 64 rows."""
    tile_rows, num_columns = refs.staged.shape
    is_turned = tile_rows < 64

    def run(total: jax.Ref) -> jax.Array:
        @pl.loop(0, num_turns)
        def _(turn: jax.Array) -> None:
            stage = lax.rem(turn, jnp.int32(_NUM_STAGES))
            plgpu.barrier_wait(refs.landed.at[stage])
            x, weights = refs.x_stages.at[stage], refs.weights_stages.at[stage]
            if is_turned:
                plgpu.wgmma(total, weights.T, x.T)
            else:
                plgpu.wgmma(total, x, weights)
            # The product before this one is done, so its pieces may be overwritten.
            plgpu.wgmma_wait(1)

            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_arrive(refs.free.at[lax.rem(turn - 1, jnp.int32(_NUM_STAGES))])

        return total[...]

    shape = (num_columns, tile_rows) if is_turned else (tile_rows, num_columns)
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
