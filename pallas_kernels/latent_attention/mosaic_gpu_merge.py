"""The second kernel of decode rows on Hopper: merges the partial results of cut requests.

One CTA computes one request, 64 heads and some columns. Results of requests that no share cuts are
written already; their CTAs end immediately. Partial results are a few megabytes that were just
written, so most of them are still in the L2 cache.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.latent_attention.mosaic_gpu_attend import LN_2, LOG2_E, MASKED_LOGIT, TILE
from pallas_kernels.paged_attention.decode_schedule import FIRST_UNIT, NUM_TILES

_COLUMN = plgpu.Layout.WGMMA.reduce(1)


class Refs(NamedTuple):
    """The kernel's arrays; the last is in SMEM, all others are in GMEM."""

    partial_out: jax.Ref  # f32[2 * num_shares, num_heads, latent_dim]
    partial_lse: jax.Ref  # f32[2 * num_shares, num_heads]
    query_start_loc: jax.Ref  # i32[num_reqs + 1]
    requests: jax.Ref  # i32[num_reqs, 6]
    share_len: jax.Ref  # i32[1]
    out: jax.Ref  # f[num_tokens, num_heads, latent_dim]
    lse: jax.Ref  # f32[num_tokens, num_heads]
    staged: jax.Ref  # f[64, num_columns]


class Sum(NamedTuple):
    """The parts merged so far; logarithms are to base 2."""

    largest: jax.Array  # f32[64], the largest of the parts' logarithms
    total: jax.Array  # f32[64], the sum of the parts' denominators, divided by exp2(largest)
    values: jax.Array  # f32[64, num_columns], the weighted sum of values, divided likewise


def merge_partials(
    partial_out: jax.Array,  # f32[2 * num_shares, num_head_tiles * 64, latent_dim]
    partial_lse: jax.Array,  # f32[2 * num_shares, num_head_tiles * 64]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    requests: jax.Array,  # i32[num_reqs, 6], of `DecodeSchedule`
    share_len: jax.Array,  # i32[1], units of a share
    out_ref: jax.Ref,  # f[num_tokens, num_head_tiles * 64, latent_dim]
    lse_ref: jax.Ref,  # f32[num_tokens, num_head_tiles * 64]
    *,
    num_columns: int,
    batch_size: int,
    interpret: bool | plgpu.InterpretGPUParams,
) -> None:
    """Writes the results of cut requests only. Slots are numbered as in `attend`.

    Args:
        num_columns: Columns that a CTA computes.
        batch_size: Parts of a request that a CTA reads together.
    """
    _, num_heads, latent_dim = partial_out.shape
    merge = plgpu.kernel(
        functools.partial(_kernel_body, num_columns=num_columns, batch_size=batch_size),
        out_type=(),
        scratch_types=[
            plgpu.SMEM(
                (TILE, num_columns),
                out_ref.dtype,
                transforms=(
                    plgpu.TilingTransform((8, num_columns)),
                    plgpu.SwizzleTransform(num_columns * out_ref.dtype.itemsize),
                ),
            )
        ],
        grid=(requests.shape[0], num_heads // TILE, latent_dim // num_columns),
        grid_names=("request", "head_tile", "part"),
        kernel_name="latent_decode_merge",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    merge(partial_out, partial_lse, query_start_loc, requests, share_len, out_ref, lse_ref)


def _kernel_body(*operands: jax.Ref, num_columns: int, batch_size: int) -> None:
    refs = Refs(*operands)
    req, part = lax.axis_index("request"), lax.axis_index("part")
    heads = pl.ds(lax.axis_index("head_tile") * TILE, TILE)
    columns = pl.ds(part * num_columns, num_columns)
    first_unit, num_tiles = refs.requests[req, FIRST_UNIT], refs.requests[req, NUM_TILES]
    first_share = lax.div(first_unit, refs.share_len[0])
    last_share = lax.div(first_unit + num_tiles - 1, refs.share_len[0])

    def add_shares(shares: list[jax.Array], joined: Sum) -> Sum:
        # All reads start before the first wait.
        slots = [2 * share + (share == first_share).astype(jnp.int32) for share in shares]
        parts = [_read_part(refs, slot, heads, columns) for slot in slots]
        for lse, values in parts:
            joined = _join(joined, lse, values)
        return joined

    def add_batch(i: jax.Array, joined: Sum) -> Sum:
        start = first_share + i * batch_size
        return add_shares([start + j for j in range(batch_size)], joined)

    @pl.when((num_tiles > 0) & (last_share > first_share))
    def _() -> None:
        num_batches = lax.div(last_share + 1 - first_share, jnp.int32(batch_size))
        joined = lax.fori_loop(0, num_batches, add_batch, _nothing(num_columns))
        joined = lax.fori_loop(
            first_share + num_batches * batch_size,
            last_share + 1,
            lambda share, joined: add_shares([share], joined),
            joined,
        )
        values = joined.values * _across(1.0 / joined.total, num_columns)
        token = refs.query_start_loc[req]
        refs.staged[...] = values.astype(refs.staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.staged, refs.out.at[token, heads, columns])

        @pl.when(part == 0)
        def _() -> None:
            refs.lse[token, heads] = joined.largest * LN_2 + jnp.log(joined.total)

        plgpu.wait_smem_to_gmem(0)


def _read_part(
    refs: Refs, slot: jax.Array, heads: pl.Slice, columns: pl.Slice
) -> tuple[jax.Array, jax.Array]:  # f32[64] to base 2, f32[64, num_columns]
    # JAX 0.11 has no optimized read from GMEM.
    lse = plgpu.load(refs.partial_lse.at[slot, heads], layout=_COLUMN, optimized=False)
    values = plgpu.load(
        refs.partial_out.at[slot, heads, columns], layout=plgpu.Layout.WGMMA, optimized=False
    )
    return lse * LOG2_E, values


def _join(joined: Sum, lse: jax.Array, values: jax.Array) -> Sum:
    num_columns = values.shape[1]
    largest = jnp.maximum(joined.largest, lse)
    rescale = jnp.exp2(joined.largest - largest)
    weight = jnp.exp2(lse - largest)
    return Sum(
        largest,
        joined.total * rescale + weight,
        joined.values * _across(rescale, num_columns) + values * _across(weight, num_columns),
    )


def _nothing(num_columns: int) -> Sum:
    return Sum(
        plgpu.layout_cast(jnp.full((TILE,), MASKED_LOGIT, jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE, num_columns), jnp.float32), plgpu.Layout.WGMMA),
    )


def _across(column: jax.Array, num_columns: int) -> jax.Array:
    """f32[64] -> f32[64, num_columns]."""
    return lax.broadcast_in_dim(column, (TILE, num_columns), [0])
