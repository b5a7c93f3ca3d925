"""The Mosaic GPU kernel of decode attention on Hopper (sm_90a): one query token per request.

The path of a KV tile (bf16, head_dim 128, 4 query heads per KV head; 64 keys are one tile):

    cache, in device memory: blocks 7, 2, 9, 4 of a request, 16 keys each
      |                                                       |
      | memory warpgroup: a TMA copy per block, all four land | the same for V
      | in one swizzled tile and arrive on one barrier        |
      v                                                       v
    K tile bf16[64, 128], in shared memory                  V tile bf16[64, 128]
      |                                                       |
      | compute warpgroup: wgmma, K x Q^T                     |
      v                                                       |
    logits^T f32[64, 8], in registers                         |
      |                                                       |
      | scale, soft cap, mask, running softmax down a column  |
      v                                                       v
    weights^T bf16[64, 8], to shared memory  ---------->  wgmma, V^T x weights^T
                                                              |
                                                              v
                          out^T f32[128, 8], in registers, added up over the tiles of a segment,
                          then stored to device memory: one partial result

The 64 rows of a wgmma are keys, not queries. A request has `group_size` query rows per KV head
(often 4, padded to 8), so tiles of 64 query rows would be nearly all padding. Logits then take 4
registers per thread, the output takes 8, and the work between two tiles stays short.

There are two rings of tiles, one for K and one for V. For heads wider than 384, two rings of two
tiles each are too large. Then K and V alternate in one ring of three tiles: K 0, V 0, K 1, then V 1
in the place of K 0, and so on.

Most of the time goes into reading the cache. Every byte is read once and used for a few
multiplications, so the kernel must keep enough copies in flight and all SMs busy:
- In flight. An H200's 4.8 TB/s (data sheet) times 1 microsecond (assumed) is 36 KB per SM. Two CTAs
  per SM with 3 stages of 32 KB each have up to 192 KB in flight, and while one CTA is between two
  requests, the other reads.
- Latency. The operations on one tile (wait, wgmma, maximum over four warps, exponentials, wgmma)
  are a chain of a few hundred instructions. At full speed, an SM gets a 32 KB tile every 0.9
  microseconds, and each of its two CTAs every 1.8 (calculated, not measured), many times the length
  of the chain.
- Balance. `decode_splits.py` chooses between one program per (request, KV head) and equal shares.

Memory past a sequence's end may hold NaN, and 0 * NaN is NaN in wgmma. Logits are masked by a
select. Rows of V that are not seen are set to zero in shared memory; only the first and the last
tile of a request have such rows. Blocks without a seen key are not read: the tile's nearest block
with a seen key is read again instead.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.decode_schedule import (
    END_UNIT,
    FIRST_SEEN,
    FIRST_TILE,
    FIRST_UNIT,
    NEXT_REQUEST,
    NUM_TILES,
    SEQ_LEN,
    START_REQUEST,
    START_UNIT,
    DecodeSchedule,
)
from pallas_kernels.paged_attention.tuned_blocks import (
    DecodeConfig,
    swizzle_width,
    v_tile_width,
)

# Value of masked logits and of empty running maxima. Finite, because -inf minus -inf is NaN.
_MASKED_LOGIT = -1e30
_LOG2_E = math.log2(math.e)
# The two warpgroups of a CTA, by their index on the axis "role".
_COMPUTE, _MEMORY = range(2)


class _Gmem(NamedTuple):
    """Arrays in device memory."""

    q: object  # f[num_reqs * num_kv_heads, group_rows, head_dim]
    kv: object  # f[num_rows * num_blocks * 2 * num_kv_heads, block_size, head_dim]
    row: object  # i32[1]
    block_tables: object  # i32[num_reqs, max_blocks_per_req]
    requests: object  # i32[num_reqs, 6], see `DecodeSchedule`
    shares: object  # i32[num_shares, 3], likewise
    out: object  # f32[num_slots, v_width, group_rows]
    lse: object  # f32[num_slots, group_rows]


class _Smem(NamedTuple):
    """The shared memory of a CTA: tiles, and the barriers that pass them between warpgroups.

    If K and V share a ring, their entries are the same refs.
    """

    q: object  # f[group_rows, head_dim]
    weights: object  # f[group_rows, kv_tile]
    k: object  # f[num_stages, kv_tile, head_dim]
    v: object  # f[num_stages, kv_tile, v_width]
    q_landed: object  # the copy of Q has arrived
    k_landed: object  # [num_stages], all copies of a K tile have arrived
    v_landed: object  # [num_stages]
    k_free: object  # [num_stages], the compute warpgroup has finished with a K tile
    v_free: object  # [num_stages]


class _Segment(NamedTuple):
    """A run of tiles of one (request, KV head). A step is a tile counted from the share's start."""

    req: jax.Array  # i32[]
    head: jax.Array  # i32[], KV head
    start_step: jax.Array  # i32[]
    end_step: jax.Array  # i32[]
    start_tile: jax.Array  # i32[], of the first step, counted from position 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernel:
    """The kernel for one set of static sizes."""

    config: DecodeConfig
    group_rows: int  # query rows of a (request, KV head), padded to a multiple of 8
    head_dim: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    scale: float
    soft_cap: float | None
    has_left_edge: bool  # a window or a chunk: positions on the left may be unseen
    is_cut: bool  # segments of one (request, KV head) may lie in several shares
    is_interpreted: bool

    @property
    def v_width(self) -> int:
        """Columns of a V tile. wgmma computes 64 rows of out^T at once; the last may be padding."""
        return v_tile_width(self.head_dim)

    @property
    def copy_rows(self) -> int:
        """Number of keys in one TMA copy: a block, or the part of it that one tile holds."""
        return min(self.block_size, self.config.kv_tile)

    @property
    def v_copy_rows(self) -> int:
        """The same for V. A copy fills contiguous memory: at most 8 rows if columns are padded."""
        return self.copy_rows if self.v_width == self.head_dim else 8

    def launch(
        self,
        q: jax.Array,  # f[num_reqs * num_kv_heads, group_rows, head_dim]
        kv_cache: jax.Array,  # f[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
        row: jax.Array,  # i32[]
        block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
        schedule: DecodeSchedule,
        *,
        num_slots: int,
        interpret: object,
    ) -> tuple[jax.Array, jax.Array]:  # see `_Gmem.out`, `_Gmem.lse`
        """Runs the kernel, one program per share."""
        scratch = self._scratch(q.dtype)

        def body(*gmem_refs: object) -> None:
            # Allocated here for both warpgroups at once.
            pl.run_scoped(
                lambda **smem_refs: self._run(_Gmem(*gmem_refs), _smem(smem_refs)),
                collective_axes="role",
                **scratch,
            )

        return plgpu.kernel(
            body,
            kernel_name="paged_attention_decode",
            out_type=(
                jax.ShapeDtypeStruct((num_slots, self.v_width, self.group_rows), jnp.float32),
                jax.ShapeDtypeStruct((num_slots, self.group_rows), jnp.float32),
            ),
            grid=(schedule.shares.shape[0],),
            grid_names=("share",),
            num_threads=2,
            thread_name="role",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                reduction_scratch_bytes=self.config.reduction_bytes(self.group_rows),
            ),
            interpret=interpret or None,
        )(
            q,
            # Flat, because a TMA descriptor has 5 dimensions and the swizzle takes two of them.
            kv_cache.reshape(-1, self.block_size, self.head_dim),
            row.reshape(1),
            block_tables,
            schedule.requests,
            schedule.shares,
        )

    def _scratch(self, dtype: jnp.dtype) -> dict[str, object]:
        """Types of the refs of `_Smem`, without V's if K and V share a ring."""
        kv_tile, num_stages = self.config.kv_tile, self.config.num_stages

        # A 128-byte swizzle is 64 numbers wide. head_dim 96 needs 64 bytes, and 80 needs 32 bytes.
        width = swizzle_width(self.head_dim)
        transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))

        def tile(*shape: int) -> object:
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def landed(box_rows: int) -> object:
            return plgpu.Barrier(num_arrivals=kv_tile // box_rows, num_barriers=num_stages)

        free = plgpu.Barrier(num_barriers=num_stages)
        scratch = {
            "q": tile(self.group_rows, self.head_dim),
            "weights": tile(self.group_rows, kv_tile),
            "k": tile(num_stages, kv_tile, self.head_dim),
            "q_landed": plgpu.Barrier(),
            "k_landed": landed(self.copy_rows),
            "k_free": free,
        }
        if not self.config.has_one_ring:
            scratch |= {
                "v": tile(num_stages, kv_tile, self.v_width),
                "v_landed": landed(self.v_copy_rows),
                "v_free": free,
            }
        return scratch

    def _turns(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numbers of tiles that precede the K tile and the V tile of a step in their rings."""
        return (2 * step, 2 * step + 1) if self.config.has_one_ring else (step, step)

    def _stages(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places of the K and V tiles of a step in their rings."""
        num_stages = jnp.int32(self.config.num_stages)
        k_turn, v_turn = self._turns(step)
        if v_turn is k_turn:
            stage = lax.rem(step, num_stages)
            return stage, stage
        return lax.rem(k_turn, num_stages), lax.rem(v_turn, num_stages)

    def _run(self, gmem: _Gmem, smem: _Smem) -> None:
        """The whole program of a CTA: each warpgroup takes its role."""
        role = lax.axis_index("role")
        pl.when(role == _COMPUTE)(functools.partial(self._compute_role, gmem, smem))
        pl.when(role == _MEMORY)(functools.partial(self._memory_role, gmem, smem))

    def _for_each_segment(self, gmem: _Gmem, visit: Callable[[_Segment], None]) -> None:
        """Calls `visit` for each segment of this program's share. Both warpgroups call this."""
        share = lax.axis_index("share")
        start_unit = gmem.shares[share, START_UNIT]
        num_steps = gmem.shares[share, END_UNIT] - start_unit

        def step_over(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            step, req = state
            num_tiles = gmem.requests[req, NUM_TILES]
            units_before = start_unit + step - gmem.requests[req, FIRST_UNIT]
            head = lax.div(units_before, num_tiles)
            tiles_before = units_before - head * num_tiles
            end_step = jnp.minimum(step + num_tiles - tiles_before, num_steps)
            is_last_head = head == self.num_kv_heads - 1
            next_req = jnp.where(is_last_head, gmem.requests[req, NEXT_REQUEST], req)
            start_tile = gmem.requests[req, FIRST_TILE] + tiles_before
            visit(_Segment(req, head, step, end_step, start_tile))
            return end_step, next_req

        start = (jnp.int32(0), gmem.shares[share, START_REQUEST])
        lax.while_loop(lambda state: state[0] < num_steps, step_over, start)

    def _memory_role(self, gmem: _Gmem, smem: _Smem) -> None:
        """Keeps the stages full: waits for one to be free, and copies the next tile into it."""
        num_stages = jnp.int32(self.config.num_stages)
        share = lax.axis_index("share")
        num_steps = gmem.shares[share, END_UNIT] - gmem.shares[share, START_UNIT]

        def load_segment(segment: _Segment) -> None:
            block_size = jnp.int32(self.block_size)
            seen_blocks = (
                lax.div(gmem.requests[segment.req, FIRST_SEEN], block_size),
                lax.div(gmem.requests[segment.req, SEQ_LEN] - 1, block_size),
            )
            row_start = gmem.row[0] * self.num_blocks

            def load_tile(step: jax.Array, _: None) -> None:
                tile = segment.start_tile + step - segment.start_step
                # Block ids are read before waiting, so that their latency is hidden.
                logical_blocks, first_row = self._blocks_of_tile(tile)
                blocks = [
                    # Table entries without seen keys may be garbage, so another block is read.
                    gmem.block_tables[segment.req, jnp.clip(logical_block, *seen_blocks)]
                    for logical_block in logical_blocks
                ]
                # In the flat cache, the keys of all heads of a block come before the values.
                keys = [(row_start + b) * (2 * self.num_kv_heads) + segment.head for b in blocks]
                values = [block + self.num_kv_heads for block in keys]
                for turn, stage, blocks, tiles, box_rows, landed, free in zip(
                    self._turns(step),
                    self._stages(step),
                    (keys, values),
                    (smem.k, smem.v),
                    (self.copy_rows, self.v_copy_rows),
                    (smem.k_landed, smem.v_landed),
                    (smem.k_free, smem.v_free),
                    strict=True,
                ):

                    @pl.when(turn >= num_stages)
                    def _wait_until_free(free: object = free, stage: jax.Array = stage) -> None:
                        plgpu.barrier_wait(free.at[stage])

                    for key in range(0, self.config.kv_tile, box_rows):
                        block = blocks[key // self.copy_rows]
                        row = first_row + key % self.copy_rows
                        plgpu.copy_gmem_to_smem(
                            gmem.kv.at[block, pl.ds(row, box_rows)],
                            tiles.at[stage, pl.ds(key, box_rows), pl.ds(0, self.head_dim)],
                            landed.at[stage],
                        )

            lax.fori_loop(segment.start_step, segment.end_step, load_tile, None)

        self._for_each_segment(gmem, load_segment)

        rings = (smem.k_free,) if self.config.has_one_ring else (smem.k_free, smem.v_free)

        def drain(turn: jax.Array, _: None) -> None:
            for free in rings:
                plgpu.barrier_wait(free.at[lax.rem(turn, num_stages)])

        # Wait once for each arrival, so that the compute warpgroup can treat all tiles alike.
        num_turns, _ = self._turns(num_steps)
        lax.fori_loop(jnp.maximum(num_turns - num_stages, 0), num_turns, drain, None)

    def _blocks_of_tile(self, tile: jax.Array) -> tuple[list[jax.Array], jax.Array | int]:
        """The logical block that each copy of a tile reads, and the first row that is read.

        Tiles of 64 keys: with blocks of 16, tile 2 is logical blocks 8 to 11, from row 0. With
        blocks of 128, tile 2 is block 1 from row 0, and tile 3 is block 1 from row 64.
        """
        kv_tile, block_size = self.config.kv_tile, self.block_size
        if block_size <= kv_tile:
            num_blocks = kv_tile // block_size
            return [tile * num_blocks + i for i in range(num_blocks)], 0
        tiles_of_block = jnp.int32(block_size // kv_tile)
        return [lax.div(tile, tiles_of_block)], lax.rem(tile, tiles_of_block) * kv_tile

    def _compute_role(self, gmem: _Gmem, smem: _Smem) -> None:
        """Multiplies the tiles as they arrive, and stores one partial result per segment."""
        kv_tile, rows = self.config.kv_tile, self.group_rows

        def attend_segment(segment: _Segment) -> None:
            head_of_req = segment.req * self.num_kv_heads + segment.head
            plgpu.copy_gmem_to_smem(gmem.q.at[head_of_req], smem.q, smem.q_landed)
            # Positions relative to the position at which step 0 would begin.
            shift = (segment.start_tile - segment.start_step) * kv_tile
            seen_start = gmem.requests[segment.req, FIRST_SEEN] - shift
            seen_end = gmem.requests[segment.req, SEQ_LEN] - shift
            plgpu.barrier_wait(smem.q_landed)

            def add_tile(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                out, largest, denominators = state
                k_stage, v_stage = self._stages(step)
                # The tile's seen keys are [start, end). For inner tiles this includes [0, kv_tile).
                start, end = seen_start - step * kv_tile, seen_end - step * kv_tile

                plgpu.barrier_wait(smem.k_landed.at[k_stage])
                products = self._product(smem.k.at[k_stage], smem.q.transpose((1, 0)))
                plgpu.barrier_arrive(smem.k_free.at[k_stage])
                logits = self._mask(self._logits(products), start, end)

                new_largest = jnp.maximum(largest, logits.max(axis=0))
                rescale = jnp.exp2(largest - new_largest)
                weights = jnp.exp2(logits - _down_columns(new_largest, kv_tile))
                # The sum over the keys of a tile is computed once, at the end of the segment.
                denominators = denominators * _down_columns(rescale, kv_tile) + weights
                self._store_weights(smem, weights)

                plgpu.barrier_wait(smem.v_landed.at[v_stage])
                v_tile = smem.v.at[v_stage]

                @pl.when((end < kv_tile) | (start > 0) if self.has_left_edge else end < kv_tile)
                def _clear_unseen() -> None:
                    self._clear_rows_outside(v_tile, start, end)

                # Makes the stores to shared memory visible to wgmma.
                plgpu.commit_smem()
                product = self._product(v_tile.transpose((1, 0)), smem.weights.transpose((1, 0)))
                plgpu.barrier_arrive(smem.v_free.at[v_stage])
                out = out * _down_columns(rescale, self.v_width) + product
                return out, new_largest, denominators

            empty = (
                _filled((self.v_width, rows), 0.0, plgpu.Layout.WGMMA),
                _filled((rows,), _MASKED_LOGIT, plgpu.Layout.WGMMA.reduce(0)),
                _filled((kv_tile, rows), 0.0, plgpu.Layout.WGMMA),
            )
            out, largest, denominators = lax.fori_loop(
                segment.start_step, segment.end_step, add_tile, empty
            )
            denominator = denominators.sum(axis=0)
            slot = head_of_req + lax.axis_index("share") if self.is_cut else head_of_req
            _store_short_rows(gmem.out.at[slot], out / _down_columns(denominator, self.v_width))
            _store_short_rows(gmem.lse.at[slot], largest * (1 / _LOG2_E) + jnp.log(denominator))

        self._for_each_segment(gmem, attend_segment)

    def _logits(self, products: jax.Array) -> jax.Array:  # f32[kv_tile, group_rows], both
        """Logits times log2(e), because the hardware's exponential is a power of two."""
        if self.soft_cap is None:
            return products * (self.scale * _LOG2_E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1). The hardware's own tanh has 11 correct bits, which a cap
        # of 50 turns into errors of 0.02.
        exp_2x = jnp.exp2(products * (2 * _LOG2_E * self.scale / self.soft_cap))
        return (1 - 2 / (exp_2x + 1)) * (self.soft_cap * _LOG2_E)

    def _mask(self, logits: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        """Masks the keys outside of [start, end). Every scheduled tile has a key inside."""
        key = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=plgpu.Layout.WGMMA)
        is_seen = (key >= start) & (key < end) if self.has_left_edge else key < end
        return jnp.where(is_seen, logits, _MASKED_LOGIT)

    def _store_weights(self, smem: _Smem, weights: jax.Array) -> None:
        """Puts the weights, f32[kv_tile, group_rows], where wgmma can read them.

        wgmma reads its second operand only from shared memory. The weights are stored transposed,
        with contiguous keys: 8 query rows would not fill the narrowest swizzle, 16 numbers.
        """
        weights = weights.astype(smem.weights.dtype)
        weights = plgpu.layout_cast(weights, plgpu.Layout.WGMMA_TRANSPOSED)
        smem.weights.transpose((1, 0))[...] = weights

    def _clear_rows_outside(self, v_tile: object, start: jax.Array, end: jax.Array) -> None:
        """Sets the rows of a V tile outside of [start, end) to zero."""
        width = swizzle_width(self.head_dim)
        for column in range(0, self.head_dim, width):
            piece_ref = v_tile.at[:, pl.ds(column, width)]
            piece = plgpu.layout_cast(piece_ref[...], plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=plgpu.Layout.WGMMA)
            is_seen = (key >= start) & (key < end)
            piece_ref[...] = jnp.where(is_seen, piece, jnp.zeros_like(piece))

    def _product(self, a: object, b: object) -> jax.Array:
        """a x b of two tiles in shared memory, f32.

        The product has its own accumulator. It is small, and adding it to the output takes no more
        instructions than rescaling the output alone.
        """
        if self.is_interpreted:
            # The interpreter detects races of plain reads, but not of wgmma's reads.
            a, b = a[...], b[...]
            # Plain reads need a fence before the next copy into the tile; wgmma's reads do not.
            plgpu.commit_smem()
            return jnp.dot(a, b, preferred_element_type=jnp.float32)

        def multiply(acc_ref: object) -> jax.Array:
            plgpu.wgmma(acc_ref, a, b)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _smem(refs: dict[str, object]) -> _Smem:
    """The refs by name; V has K's refs if they share a ring."""
    shared = {f"v{name[1:]}": ref for name, ref in refs.items() if name[:1] == "k"}
    return _Smem(**{**shared, **refs})


def _filled(shape: tuple[int, ...], value: float, layout: object) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _down_columns(row: jax.Array, num_rows: int) -> jax.Array:
    """Repeats f32[group_rows] as every row of f32[num_rows, group_rows]."""
    return lax.broadcast_in_dim(row, (num_rows, row.shape[0]), [1])


def _store_short_rows(ref: object, value: jax.Array) -> None:
    """Stores registers to device memory in rows shorter than a cache line (8 numbers, mostly).

    TODO: drop when JAX >= 0.12. Older versions have no `plgpu.store` and allow such stores.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
