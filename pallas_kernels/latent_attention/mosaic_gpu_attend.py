"""The attention kernel of decode rows on Hopper: one CTA for one share of the tiles and 64 heads.

Four warpgroups form a pipeline:

    memory          loads query tiles, and tiles of the cache into a ring of two, by TMA
    scores          S = Q K^T, softmax, P = exp(S - max)
    values (two)    O = O * rescale + P V, each for its half of the output's columns

A cache tile has 64 tokens with all their columns, 512 + 64 in DeepSeek. It is copied once: all of
it is K, and its first 512 columns are V. The 64 x 512 sums of O need 256 registers per thread, more
than a thread can have, so two warpgroups share them. P has the size of the tile's rotary columns,
64 x 64. It overwrites them, because S needs them and V does not. While the value warpgroups process
one tile, the scores warpgroup processes the next.

Shared memory with 512 + 64 columns of 16 bits, in bytes: Q 73,728, the ring 147,456, statistics
1,024.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.decode_schedule import (
    END_UNIT,
    FIRST_UNIT,
    NEXT_REQUEST,
    NUM_TILES,
    SEQ_LEN,
    START_REQUEST,
    START_UNIT,
)

TILE = 64  # tokens of a cache tile, heads of a query tile, columns of a swizzled SMEM tile
NUM_STAGES = 2  # cache tiles in shared memory; there is no room for a third
MASKED_LOGIT = -1e30  # finite: -inf minus -inf is NaN
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Registers per thread of each warpgroup: 104 + 2 * 184 + 40 = 512, all that an SM has. A value
# warpgroup uses 128 of its 184 for its sums.
SCORES_REGISTERS, VALUES_REGISTERS, MEMORY_REGISTERS = 104, 184, 40

# The most columns of one sum, and so of one wgmma. A kernel of 512 threads starts with 128
# registers per thread, and ptxas rejects instructions that need more. The sum of a wgmma with 256
# columns alone would need 128.
SUM_COLUMNS = 128

RESCALE, DENOMINATOR = range(2)  # the statistics of a tile
_SWIZZLED = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))


class Refs(NamedTuple):
    """The kernel's arrays and barriers; the first eleven are in GMEM, the next three in SMEM."""

    q: jax.Ref  # f[num_tokens, num_heads, cache_dim]
    blocks: jax.Ref  # f[num_rows * num_blocks, block_size, cache_dim]
    first_block: jax.Ref  # i32[1]
    block_tables: jax.Ref  # i32[num_reqs, max_blocks_per_req]
    query_start_loc: jax.Ref  # i32[num_reqs + 1]
    requests: jax.Ref  # i32[num_reqs, 6]
    shares: jax.Ref  # i32[num_shares, 3]
    out: jax.Ref  # f[num_tokens, num_heads, latent_dim]
    lse: jax.Ref  # f32[num_tokens, num_heads]
    partial_out: jax.Ref  # f32[2 * num_shares, num_heads, latent_dim]
    partial_lse: jax.Ref  # f32[2 * num_shares, num_heads]
    q_tile: jax.Ref  # f[1, 64, cache_dim]
    ring: jax.Ref  # f[NUM_STAGES, 64, cache_dim]
    statistics: jax.Ref  # f32[NUM_STAGES, 2, 64]
    q_arrived: jax.Ref  # barrier
    q_is_free: jax.Ref  # barrier
    tile_arrived: jax.Ref  # barrier[NUM_STAGES]
    weights_ready: jax.Ref  # barrier[NUM_STAGES]
    tile_is_free: jax.Ref  # barrier[NUM_STAGES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tiles of one request in one share; all fields except `heads` are i32[] or bool[]."""

    req: jax.Array
    token: jax.Array  # the request's query token
    heads: pl.Slice  # of this CTA
    seq_len: jax.Array
    first_tile: jax.Array  # counted from position 0
    num_tiles: jax.Array  # at least 1
    is_whole: jax.Array  # whether these are all the tiles of the request
    partial_slot: jax.Array  # the slot of its partial result, if it is not whole
    first_in_share: jax.Array  # number of tiles of the share before it
    num_in_share: jax.Array  # tiles of the share

    def slot(self, i: jax.Array) -> jax.Array:
        """The place of tile i in the ring."""
        return lax.rem(self.first_in_share + i, jnp.int32(NUM_STAGES))

    def num_after(self, i: jax.Array) -> jax.Array:
        """Tiles of the share that follow tile i."""
        return self.num_in_share - self.first_in_share - i - 1

    def num_seen(self, i: jax.Array) -> jax.Array:
        """Positions from the start of tile i to the end of the sequence, at least 1."""
        return self.seq_len - (self.first_tile + i) * TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive rows of one block, and where in a tile they go."""

    block: jax.Array  # i32[], logical
    offset: jax.Array | int  # first row in the block
    start: int  # first row in the tile
    size: int


def attend(
    q: jax.Array,  # f[num_tokens, num_head_tiles * 64, cache_dim]
    blocks: jax.Array,  # f[num_rows * num_blocks, block_size, cache_dim]
    first_block: jax.Array,  # i32[1]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    requests: jax.Array,  # i32[num_reqs, 6], of `DecodeSchedule`
    shares: jax.Array,  # i32[num_shares, 3], likewise
    out_ref: jax.Ref,  # f[num_tokens, num_head_tiles * 64, latent_dim]
    lse_ref: jax.Ref,  # f32[num_tokens, num_head_tiles * 64]
    *,
    latent_dim: int,
    scale: float,
    interpret: bool | plgpu.InterpretGPUParams,
) -> tuple[jax.Array, jax.Array]:
    """Writes the results of whole requests; returns partial results of requests that shares cut.

    A share has at most two cut requests. The part of one that began in an earlier share is written
    to slot `2 * share`; the part of one that begins here, to `2 * share + 1`. Other slots are not
    written.

    Returns:
        f32[2 * num_shares, num_head_tiles * 64, latent_dim] and f32[2 * num_shares, ...].
    """
    num_shares, num_heads, cache_dim = shares.shape[0], q.shape[1], q.shape[2]
    kernel = plgpu.kernel(
        functools.partial(
            _kernel_body, latent_dim=latent_dim, scale=scale, is_interpreted=bool(interpret)
        ),
        out_type=[
            jax.ShapeDtypeStruct((2 * num_shares, num_heads, latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * num_shares, num_heads), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((1, TILE, cache_dim), q.dtype, transforms=_SWIZZLED),
            plgpu.SMEM((NUM_STAGES, TILE, cache_dim), q.dtype, transforms=_SWIZZLED),
            plgpu.SMEM((NUM_STAGES, 2, TILE), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=max(1, TILE // blocks.shape[1]), num_barriers=NUM_STAGES),
            plgpu.Barrier(num_barriers=NUM_STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES),
        ],
        grid=(num_shares, num_heads // TILE),
        grid_names=("share", "head_tile"),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="latent_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    return kernel(
        *(q, blocks, first_block, block_tables, query_start_loc, requests, shares),
        *(out_ref, lse_ref),
    )


def _kernel_body(*operands: jax.Ref, latent_dim: int, scale: float, is_interpreted: bool) -> None:
    """Runs the part of each warpgroup on each request of this CTA's share."""
    refs = Refs(*operands)
    warpgroup = lax.axis_index("warpgroup")
    visit_segments = functools.partial(_visit_segments, refs)

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.set_max_registers(SCORES_REGISTERS, action="decrease")
        weigh = functools.partial(
            _weigh, refs, latent_dim=latent_dim, scale=scale, is_interpreted=is_interpreted
        )
        visit_segments(weigh)

    for half in range(2):
        # One branch per half, because the columns must be known when the kernel is compiled.
        add_up = functools.partial(
            _add_up, refs, _sum_columns(half, latent_dim // 2), is_interpreted=is_interpreted
        )

        @pl.when(warpgroup == 1 + half)
        def _(add_up: Callable[[Segment], None] = add_up) -> None:
            plgpu.set_max_registers(VALUES_REGISTERS, action="increase")
            visit_segments(add_up)

    @pl.when(warpgroup == 3)
    def _() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        visit_segments(functools.partial(_load, refs))


def _load(refs: Refs, segment: Segment) -> None:
    """The memory warpgroup: loads the tiles of a segment, and its queries."""
    block_size = refs.blocks.shape[1]
    first_block = refs.first_block[0]

    def load_tile(i: jax.Array, _: None) -> None:
        slot = segment.slot(i)
        pieces = _pieces_of_tile(segment, i, block_size)
        # Block ids are read before the wait, which hides the latency of device memory.
        ids = [first_block + refs.block_tables[segment.req, piece.block] for piece in pieces]

        @pl.when(segment.first_in_share + i >= NUM_STAGES)
        def _() -> None:
            plgpu.barrier_wait(refs.tile_is_free.at[slot])

        for block_id, piece in zip(ids, pieces, strict=True):
            source = refs.blocks.at[block_id, pl.ds(piece.offset, piece.size)]
            target = refs.ring.at[slot, pl.ds(piece.start, piece.size)]
            plgpu.copy_gmem_to_smem(source, target, refs.tile_arrived.at[slot])

        # Q comes after its first tile, because room for Q becomes free later than room for a tile.
        @pl.when(i == 0)
        def _() -> None:
            @pl.when(segment.first_in_share > 0)
            def _() -> None:
                plgpu.barrier_wait(refs.q_is_free)

            source = refs.q.at[segment.token, segment.heads]
            plgpu.copy_gmem_to_smem(source, refs.q_tile.at[0], refs.q_arrived)

    lax.fori_loop(0, segment.num_tiles, load_tile, None)


def _weigh(
    refs: Refs, segment: Segment, *, latent_dim: int, scale: float, is_interpreted: bool
) -> None:
    """The scores warpgroup: S and P of each tile, and the segment's logarithm of the denominator.

    P goes to the tile's rotary columns. Before a store to shared memory, Mosaic makes the warps of
    a warpgroup wait for each other, so no warp still reads these columns for S.
    """
    plgpu.barrier_wait(refs.q_arrived)

    def weigh_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, denominator = carry
        slot = segment.slot(i)
        plgpu.barrier_wait(refs.tile_arrived.at[slot])
        # Always 0, but the compiler does not know it. With a constant, it would keep 36 descriptors
        # of Q in registers during the loop, and JAX 0.11.2 would spill them.
        only_q = (i > segment.num_in_share).astype(jnp.int32)
        q_tile, tile = refs.q_tile.at[only_q], refs.ring.at[slot]
        logits = _scores_of_tile(q_tile, tile, is_interpreted)
        is_last = i == segment.num_tiles - 1

        # After the share's last tile, no other Q is loaded.
        @pl.when(is_last & (segment.num_after(i) > 0))
        def _() -> None:
            plgpu.barrier_arrive(refs.q_is_free)

        # Logits of unseen positions may be NaN, because K may be NaN there.
        position = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=plgpu.Layout.WGMMA)
        is_seen = position < segment.num_seen(i)
        logits = jnp.where(is_seen, logits * (scale * LOG2_E), MASKED_LOGIT)
        new_largest = jnp.maximum(largest, logits.max(axis=1))
        rescale = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(logits - _across(new_largest, TILE))
        denominator = denominator * rescale + weights.sum(axis=1)
        refs.ring[slot, :, pl.ds(latent_dim, TILE)] = weights.astype(refs.ring.dtype)
        refs.statistics[slot, RESCALE] = rescale

        @pl.when(is_last)
        def _() -> None:
            refs.statistics[slot, DENOMINATOR] = denominator

        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.weights_ready.at[slot])
        return new_largest, denominator

    start = _column_of(MASKED_LOGIT), _column_of(0.0)
    largest, denominator = lax.fori_loop(0, segment.num_tiles, weigh_tile, start)
    # Each tile has a position that is seen, so this is not the logarithm of 0.
    lse = largest * LN_2 + jnp.log(denominator)

    @pl.when(segment.is_whole)
    def _() -> None:
        refs.lse[segment.token, segment.heads] = lse

    @pl.when(jnp.logical_not(segment.is_whole))
    def _() -> None:
        refs.partial_lse[segment.partial_slot, segment.heads] = lse


def _add_up(refs: Refs, columns: list[pl.Slice], segment: Segment, *, is_interpreted: bool) -> None:
    """A value warpgroup: computes one half of a segment's output, in one sum per `columns`."""
    weight_columns = pl.ds(refs.out.shape[-1], TILE)
    last = segment.num_tiles - 1

    def release(i: jax.Array) -> None:
        # No other tile of the share needs the room of its last tiles.
        @pl.when(segment.num_after(i) >= NUM_STAGES)
        def _() -> None:
            plgpu.barrier_arrive(refs.tile_is_free.at[segment.slot(i)])

    def add_tile(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        slot = segment.slot(i)
        tile, weights = refs.ring.at[slot], refs.ring.at[slot, :, weight_columns]
        plgpu.barrier_wait(refs.tile_arrived.at[slot])
        plgpu.barrier_wait(refs.weights_ready.at[slot])
        _zero_unseen_rows(tile, columns, segment.num_seen(i))
        rescale = _column_in(refs.statistics.at[slot, RESCALE])
        sums = [x * _across(rescale, x.shape[1]) for x in sums]
        sums = _add_products(sums, weights, [tile.at[:, c] for c in columns], is_interpreted)

        @pl.when(i < last)
        def _() -> None:
            release(i)

        return sums

    sums = lax.fori_loop(0, segment.num_tiles, add_tile, [_zeros(c.size) for c in columns])
    factor = 1.0 / _column_in(refs.statistics.at[segment.slot(last), DENOMINATOR])
    sums = [x * _across(factor, x.shape[1]) for x in sums]

    @pl.when(segment.is_whole)
    def _() -> None:
        # The last tile's memory stages the output: no other warpgroup uses these columns any more.
        staged = refs.ring.at[segment.slot(last)]
        for x, c in zip(sums, columns, strict=True):
            staged[:, c] = x.astype(staged.dtype)
        plgpu.commit_smem()
        half = pl.ds(columns[0].start, sum(c.size for c in columns))
        # TMA copies contiguous memory. In some columns of a swizzled tile, 8 rows are contiguous.
        for row in range(0, TILE, 8):
            heads = pl.ds(segment.heads.start + row, 8)
            target = refs.out.at[segment.token, heads, half]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(row, 8), half], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    release(last)

    @pl.when(jnp.logical_not(segment.is_whole))
    def _() -> None:
        for x, c in zip(sums, columns, strict=True):
            refs.partial_out[segment.partial_slot, segment.heads, c] = x


def _visit_segments(refs: Refs, visit: Callable[[Segment], None]) -> None:
    """Calls `visit` for each request in this CTA's share.

    Each warpgroup reads the share itself: values read before they branch would be spilled.
    """
    share = lax.axis_index("share")
    start_unit, end_unit = refs.shares[share, START_UNIT], refs.shares[share, END_UNIT]

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        unit, req = carry
        first_tile = unit - refs.requests[req, FIRST_UNIT]
        num_of_request = refs.requests[req, NUM_TILES]
        num_tiles = jnp.minimum(num_of_request - first_tile, end_unit - unit)
        visit(
            Segment(
                req=req,
                token=refs.query_start_loc[req],
                heads=pl.ds(lax.axis_index("head_tile") * TILE, TILE),
                seq_len=refs.requests[req, SEQ_LEN],
                first_tile=first_tile,
                num_tiles=num_tiles,
                is_whole=num_tiles == num_of_request,
                partial_slot=2 * share + (first_tile == 0).astype(jnp.int32),
                first_in_share=unit - start_unit,
                num_in_share=end_unit - start_unit,
            )
        )
        return unit + num_tiles, refs.requests[req, NEXT_REQUEST]

    start = start_unit, refs.shares[share, START_REQUEST]
    lax.while_loop(lambda carry: carry[0] < end_unit, step, start)


def _pieces_of_tile(segment: Segment, i: jax.Array, block_size: int) -> list[Piece]:
    """The parts of blocks that form tile i of a segment."""
    first_position = (segment.first_tile + i) * TILE
    first_block = lax.div(first_position, jnp.int32(block_size))
    if block_size >= TILE:
        offset = lax.rem(first_position, jnp.int32(block_size))
        return [Piece(block=first_block, offset=offset, start=0, size=TILE)]
    # Past the end of the sequence, the table may hold anything; the last block is read again.
    last_block = lax.div(segment.seq_len - 1, jnp.int32(block_size))
    return [
        Piece(
            block=jnp.minimum(first_block + j, last_block),
            offset=0,
            start=j * block_size,
            size=block_size,
        )
        for j in range(TILE // block_size)
    ]


def _scores_of_tile(
    q: jax.Ref,  # f[64, cache_dim]
    tile: jax.Ref,  # f[64, cache_dim]
    is_interpreted: bool,
) -> jax.Array:  # f32[64, 64]
    if is_interpreted:
        return _plain_product(q[...], tile[...].T)

    def product(acc_ref: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc_ref, q, tile.transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))


def _sum_columns(half: int, half_dim: int) -> list[pl.Slice]:
    """The columns of each of the sums that one of the two value warpgroups holds."""
    first = half * half_dim
    return [
        pl.ds(first + start, min(SUM_COLUMNS, half_dim - start))
        for start in range(0, half_dim, SUM_COLUMNS)
    ]


def _zero_unseen_rows(tile: jax.Ref, columns: list[pl.Slice], num_seen: jax.Array) -> None:
    """Zeroes rows of V that were never written: they may be NaN, and 0 times NaN is NaN."""

    @pl.when(num_seen < TILE)
    def _() -> None:
        # Piece by piece: all columns at once would not fit in the registers next to the output.
        for start in range(columns[0].start, columns[-1].start + columns[-1].size, TILE):
            piece = tile.at[:, pl.ds(start, TILE)]
            values = plgpu.layout_cast(piece[...], plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA)
            piece[...] = jnp.where(row < num_seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _add_products(
    sums: list[jax.Array],  # f32[64, columns] each
    weights: jax.Ref,  # f[64, 64]
    values: list[jax.Ref],  # f[64, columns] each
    is_interpreted: bool,
) -> list[jax.Array]:  # f32[64, columns] each
    """sums + weights @ values."""
    if is_interpreted:
        products = [_plain_product(weights[...], v[...]) for v in values]
        return [x + product for x, product in zip(sums, products, strict=True)]

    def add(acc_refs: list[jax.Ref]) -> None:
        for acc_ref, v in zip(acc_refs, values, strict=True):
            plgpu.wgmma(acc_ref, weights, v)

    return pl.run_state(add)([plgpu.ACC.init(x) for x in sums])


def _plain_product(a: jax.Array, b: jax.Array) -> jax.Array:  # f32
    """A product in interpret mode, which has no sums of wgmma and sees no races with its reads."""
    product = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    # Orders the reads before the next TMA write.
    plgpu.commit_smem()
    return product


def _across(column: jax.Array, num_columns: int) -> jax.Array:
    """f32[64] -> f32[64, num_columns]."""
    return lax.broadcast_in_dim(column, (TILE, num_columns), [0])


def _zeros(num_columns: int) -> jax.Array:  # f32[64, num_columns]
    return plgpu.layout_cast(jnp.zeros((TILE, num_columns), jnp.float32), plgpu.Layout.WGMMA)


def _column_of(value: float) -> jax.Array:  # f32[64]
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _column_in(ref: jax.Ref) -> jax.Array:  # f32[64]
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(1))
