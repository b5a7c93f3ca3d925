"""The ragged Mosaic GPU kernel of `mosaic_gpu_ragged`: the program of one CTA.

A CTA computes one tile: 128 rows, which are some query tokens of one request times some query heads
of one KV head (see `ragged_tiles`). Its three warpgroups, of 128 threads each, are specialised:

    memory      copies K and V by TMA, block by block, into two rings of swizzled tiles
    compute 0   rows 0..63:   S = Q K^T, softmax, O += P V, for one KV tile after the other
    compute 1   rows 64..127: the same, half a step later

The compute warpgroups take turns: the tensor core multiplies for one while the other computes
exponentials. Both wait for each other at the barrier `turn`:

    compute 0   | S 0 | softmax 0    | PV 0, S 1 | softmax 1    | PV 1, S 2 | ...
    compute 1   |     | S 0          | softmax 0 | PV 0, S 1    | softmax 1 | ...
                      ^ turn         ^ turn      ^ turn         ^ turn

If heads are wider than 256 columns, the output of 64 rows does not fit a warpgroup's registers. Two
CTAs then compute the tile, each with half the columns of V and of the output. Both compute the same
scores from all columns of Q and K.

The cycle of a K tile, and likewise of a V tile: the memory warpgroup waits for `k_free` and starts
the copies, which arrive at `k_landed`. Both compute warpgroups wait there, multiply, and arrive at
`k_free`.
"""

import functools
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_gpu_ragged_rows import LOG2_E, RowTransfer
from pallas_kernels.paged_attention.ragged_tiles import (
    NUM_COMPUTE_WARPGROUPS,
    ROWS_PER_WARPGROUP,
    PlanField,
    RaggedConfig,
    SeenKeys,
    v_part_width,
)

_MEMORY_WARPGROUP = NUM_COMPUTE_WARPGROUPS
# The largest logit of a row that has seen no key yet. Finite: -inf minus -inf is NaN.
_NOTHING_SEEN = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedKernel:
    """The static facts of one call, and the kernel that is built from them."""

    config: RaggedConfig
    seen: SeenKeys
    num_blocks: int
    num_kv_heads: int
    block_size: int
    group_size: int
    head_dim: int
    max_blocks_per_req: int
    dtype: str
    tanh_factor: float | None  # None: no soft cap
    exponent_factor: float
    is_interpreted: bool

    @property
    def copies_per_tile(self) -> int:
        """TMA copies that fill a K (or V) tile; each arrives once at the tile's barrier."""
        return max(1, self.config.kv_tile // self.block_size)

    @property
    def rows(self) -> RowTransfer:
        return RowTransfer(config=self.config, head_dim=self.head_dim, dtype=self.dtype)

    @property
    def v_width(self) -> int:
        """Columns of V that a CTA multiplies; wide heads are computed in parts."""
        return v_part_width(self.head_dim)

    @property
    def num_v_parts(self) -> int:
        return self.head_dim // self.v_width

    @property
    def num_head_groups(self) -> int:
        return self.num_kv_heads * self.group_size // self.config.heads_per_tile

    def launch(
        self,
        q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
        kv: jax.Array,  # f[num_rows * num_blocks * 2 * num_kv_heads, block_size, head_dim]
        row: jax.Array,  # i32[1]
        block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
        plan: jax.Array,  # i32[num_tiles, len(PlanField)]
        *,
        interpret: object,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs a CTA for each tile, group of heads and part of V's columns.

        Heads are neighbors in the grid, so that they share K and V in the L2 cache.

        CTAs start in the order of the plan, the longest first, one per SM at a time. The hardware
        chooses their SMs, which balances better than a fixed (persistent) split.
        """
        num_tiles = plan.shape[0]
        lse_shape = (num_tiles, self.num_head_groups, NUM_COMPUTE_WARPGROUPS, ROWS_PER_WARPGROUP)
        call = plgpu.kernel(
            self._tile,
            out_type=(
                jax.ShapeDtypeStruct(q.shape, q.dtype),
                jax.ShapeDtypeStruct(lse_shape, jnp.float32),
            ),
            scratch_types=self._scratch(),
            grid=(num_tiles, self.num_head_groups, self.num_v_parts),
            grid_names=("tile", "head_group", "v_part"),
            num_threads=NUM_COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            kernel_name="paged_attention_ragged",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            interpret=interpret,
        )
        return call(q, kv, row, block_tables, plan)

    def _scratch(self) -> dict[str, object]:
        config, dtype = self.config, jnp.dtype(self.dtype)
        # wgmma reads operands in groups of 8 rows x swizzle: 128 bytes if head_dim is a multiple of
        # 64, 64 bytes for 96, 32 bytes for 80.
        tiled = _tiled(plgpu.find_swizzle(self.head_dim * dtype.itemsize * 8), dtype)
        v_tiled = _tiled(_v_swizzle(config.kv_tile, self.v_width, dtype), dtype)
        ring = (config.num_stages, config.kv_tile)
        landed = plgpu.Barrier(num_arrivals=self.copies_per_tile, num_barriers=config.num_stages)
        free = plgpu.Barrier(num_arrivals=NUM_COMPUTE_WARPGROUPS, num_barriers=config.num_stages)
        return {
            "q_and_out": self.rows.scratch(tiled, self.is_interpreted),
            "k_ring": plgpu.SMEM((*ring, self.head_dim), dtype, transforms=tiled),
            "v_ring": plgpu.SMEM((*ring, self.v_width), dtype, transforms=v_tiled),
            "q_landed": plgpu.Barrier(
                num_arrivals=self.rows.boxes_per_warpgroup, num_barriers=NUM_COMPUTE_WARPGROUPS
            ),
            "k_landed": landed,
            "v_landed": landed,
            "v_clean": plgpu.Barrier(num_barriers=2),
            "k_free": free,
            "v_free": free,
            "turn": plgpu.Barrier(num_arrivals=NUM_COMPUTE_WARPGROUPS),
        }

    def _tile(self, q_ref, kv_ref, row_ref, tables_ref, plan_ref, out_ref, lse_ref, **smem):  # noqa: ANN001, ANN202
        """The program of one CTA."""
        tile = lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")

        def plan(field):  # noqa: ANN001, ANN202
            """Reads a column of the plan at each use, because registers are scarcer than reads."""
            return plan_ref[tile, int(field)]

        has_work = plan(PlanField.NUM_TOKENS) > 0
        compute_registers, memory_registers = self._registers()

        @pl.when(has_work & (warpgroup < NUM_COMPUTE_WARPGROUPS))
        def _compute():  # noqa: ANN202
            plgpu.set_max_registers(compute_registers, action="increase")
            self._compute(plan, q_ref, out_ref, lse_ref, smem)

        @pl.when(has_work & (warpgroup == _MEMORY_WARPGROUP))
        def _memory():  # noqa: ANN202
            plgpu.set_max_registers(memory_registers, action="decrease")
            self._copy_keys_and_values(plan, kv_ref, row_ref, tables_ref, smem)

    def _kv_tile_at(self, plan, step):  # noqa: ANN001, ANN202
        """The KV tile of a step: first tiles without a mask, then the left, then the right edge.

        The edges come last, so that their extra work delays no copy.
        """
        if not self.seen.has_left_edge:
            return step  # tiles without a mask begin at 0, and the right edge follows them
        num_full = plan(PlanField.FULL_END) - plan(PlanField.FULL_START)
        num_left = plan(PlanField.FULL_START) - plan(PlanField.KV_START)
        edge = step - num_full
        right = plan(PlanField.FULL_END) + edge - num_left
        edge_tile = jnp.where(edge < num_left, plan(PlanField.KV_START) + edge, right)
        return jnp.where(edge < 0, plan(PlanField.FULL_START) + step, edge_tile)

    def _registers(self) -> tuple[int, int]:
        """Registers per thread of the compute and of the memory warpgroups, so that neither spills.

        The CTA takes 2 x 128 x the first + 128 x the second of an SM's 65,536 registers.
        """
        if self.head_dim > 192:
            return 240, 24  # tiles have half the keys, so there are fewer block ids to hold
        if self.seen.has_left_edge and self.copies_per_tile > 8:
            return 224, 56  # 16 block ids, and the first seen key of each tile
        return 232, 40

    def _compute(self, plan, q_ref, out_ref, lse_ref, smem):  # noqa: ANN001, ANN202
        """A compute warpgroup's part of a tile: its 64 rows against all KV tiles."""
        config = self.config
        warpgroup = lax.axis_index("warpgroup")
        q_tile, chunks = (ref.at[warpgroup] for ref in smem["q_and_out"])
        k_ring, v_ring = smem["k_ring"], smem["v_ring"]  # f[num_stages, kv_tile, ...]
        num_full = plan(PlanField.FULL_END) - plan(PlanField.FULL_START)
        num_steps = plan(PlanField.KV_END) - plan(PlanField.KV_START)
        tokens = config.tokens_per_warpgroup

        def swap_turns():  # noqa: ANN202
            """Waits until both warpgroups are here. Then the other one uses the tensor core."""
            plgpu.barrier_arrive(smem["turn"])
            plgpu.barrier_wait(smem["turn"])

        def stage_of(step):  # noqa: ANN001, ANN202
            return lax.rem(step, jnp.int32(config.num_stages))

        def v_clean_of(step):  # noqa: ANN001, ANN202
            # One barrier for even and one for odd steps: the first warpgroup may be a step ahead.
            return smem["v_clean"].at[lax.rem(step, 2)]

        def scores(step):  # noqa: ANN001, ANN202
            """Q K^T, f32[64, kv_tile], of a K tile that has landed."""

            def multiply(accumulator):  # noqa: ANN001, ANN202
                keys = k_ring.at[stage_of(step)].transpose((1, 0))
                plgpu.wgmma(accumulator, q_tile, keys)
                swap_turns()
                return accumulator[...]

            shape = (ROWS_PER_WARPGROUP, config.kv_tile)
            return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

        def add_weighted_values(out, weights, step):  # noqa: ANN001, ANN202
            """out + P V; meanwhile waits for the next step's K."""
            values = v_ring.at[stage_of(step)]

            def wait_for_next_keys():  # noqa: ANN202
                @pl.when(step + 1 < num_steps)
                def _wait():  # noqa: ANN202
                    plgpu.barrier_wait(smem["k_landed"].at[stage_of(step + 1)])

            if self.is_interpreted:
                # Interpret mode has no wgmma with an operand in registers. To its race detector
                # this is a read by threads, which `commit_smem` orders before the next TMA write.
                product = jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                wait_for_next_keys()
                return out + product

            def multiply(accumulator):  # noqa: ANN001, ANN202
                plgpu.wgmma(accumulator, weights, values)
                wait_for_next_keys()

            return pl.run_state(multiply)(plgpu.ACC.init(out))

        def attend(step, carry, is_edge):  # noqa: ANN001, ANN202
            """Adds one KV tile. The maximum in the carry is an exponent of 2."""
            out, largest, denominator = carry
            if is_edge:
                plgpu.barrier_wait(smem["v_landed"].at[stage_of(step)])
                is_dirty = self._clean_values(
                    plan, v_ring.at[stage_of(step)], v_clean_of(step), step
                )
            logits = scores(step)
            plgpu.barrier_arrive(smem["k_free"].at[stage_of(step)])
            if self.tanh_factor is not None:
                logits = _tanh(logits * self.tanh_factor)
            if is_edge:
                logits = self._mask(plan, logits, step)
            new_largest = jnp.maximum(largest, logits.max(axis=1) * self.exponent_factor)
            shrink = jnp.exp2(largest - new_largest)
            shift = lax.broadcast_in_dim(new_largest, logits.shape, [0])
            weights = jnp.exp2(logits * self.exponent_factor - shift)
            out *= lax.broadcast_in_dim(shrink, out.shape, [0])
            denominator = denominator * shrink + weights.sum(axis=1)
            weights = weights.astype(self.dtype)
            # The softmax must end before the other warpgroup's turn. The barrier keeps the compiler
            # from moving it.
            out, new_largest, denominator, weights = lax.optimization_barrier(
                (out, new_largest, denominator, weights)
            )
            plgpu.barrier_arrive(smem["turn"])
            if is_edge:

                @pl.when(is_dirty & (warpgroup == 1))
                def _wait_for_clean_values():  # noqa: ANN202
                    plgpu.barrier_wait(v_clean_of(step))

            else:
                plgpu.barrier_wait(smem["v_landed"].at[stage_of(step)])
            plgpu.barrier_wait(smem["turn"])
            out = add_weighted_values(out, weights, step)
            plgpu.barrier_arrive(smem["v_free"].at[stage_of(step)])
            return out, new_largest, denominator

        first_token = plan(PlanField.FIRST_TOKEN) + warpgroup * tokens
        self.rows.load_queries(first_token, q_ref, chunks, q_tile, smem["q_landed"].at[warpgroup])

        @pl.when(num_steps > 0)
        def _wait_for_first_keys():  # noqa: ANN202
            plgpu.barrier_wait(smem["k_landed"].at[0])

        def filled(value, *dims, layout):  # noqa: ANN001, ANN202
            return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), layout)

        rows, per_row = ROWS_PER_WARPGROUP, plgpu.Layout.WGMMA.reduce(1)
        carry = (
            filled(0.0, rows, self.v_width, layout=plgpu.Layout.WGMMA),
            filled(_NOTHING_SEEN, rows, layout=per_row),
            filled(0.0, rows, layout=per_row),
        )
        # The second warpgroup has one more `swap_turns` at the start, and the first one at the end.
        # So both call it equally often, and are half a step apart.
        pl.when(warpgroup == 1)(swap_turns)
        carry = lax.fori_loop(0, num_full, functools.partial(attend, is_edge=False), carry)
        carry = lax.fori_loop(num_full, num_steps, functools.partial(attend, is_edge=True), carry)
        pl.when(warpgroup == 0)(swap_turns)
        self.rows.store_rows(plan, carry, out_ref, lse_ref, chunks)

    def _mask(self, plan, logits, step):  # noqa: ANN001, ANN202
        """Sets logits to -inf where a row's token does not see the key."""
        tokens = self.config.tokens_per_warpgroup
        column = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        key = column + self._kv_tile_at(plan, step) * self.config.kv_tile
        last_key = plan(PlanField.SEQ_LEN) - 1
        if not self.seen.is_causal:
            return jnp.where(key <= last_key, logits, -jnp.inf)
        # Rows are ordered by head, then token: with 16 tokens, row 35 is head 2, token 3.
        row = plgpu.broadcasted_iota(
            jnp.int32, (ROWS_PER_WARPGROUP,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
        )
        first_position = plan(PlanField.FIRST_POSITION) + lax.axis_index("warpgroup") * tokens
        position = first_position + lax.rem(row, jnp.full_like(row, tokens))
        last_key = jnp.minimum(position, last_key)
        is_seen = key <= lax.broadcast_in_dim(last_key, logits.shape, [0])
        if self.seen.has_left_edge:
            first_key = self.seen.start(position)
            is_seen &= key >= lax.broadcast_in_dim(first_key, logits.shape, [0])
        return jnp.where(is_seen, logits, -jnp.inf)

    def _clean_values(self, plan, v_tile, v_clean, step):  # noqa: ANN001, ANN202
        """Sets the rows of V that no query sees to zero; returns whether the tile has such rows.

        Keys that no query sees may be NaN; the mask of the logits removes them. A weight of 0
        cannot remove such values, as 0 * NaN is NaN. The first warpgroup, which is half a step
        ahead of the other, cleans them for both.
        """
        first_key = self._kv_tile_at(plan, step) * self.config.kv_tile
        start = plan(PlanField.SEEN_START) - first_key
        end = plan(PlanField.SEQ_LEN) - first_key
        is_dirty = (start > 0) | (end < self.config.kv_tile)

        @pl.when(is_dirty & (lax.axis_index("warpgroup") == 0))
        def _clean():  # noqa: ANN202
            _zero_rows_outside(v_tile, start, end)
            plgpu.barrier_arrive(v_clean)

        return is_dirty

    def _copy_keys_and_values(self, plan, kv_ref, row_ref, tables_ref, smem):  # noqa: ANN001, ANN202
        """The memory warpgroup's part: keeps the rings of K and V tiles full."""
        config = self.config
        num_steps = plan(PlanField.KV_END) - plan(PlanField.KV_START)
        first_query_head = lax.axis_index("head_group") * config.heads_per_tile
        kv_head = lax.div(first_query_head, jnp.int32(self.group_size))
        first_block = row_ref[0] * self.num_blocks
        keys_per_copy = min(config.kv_tile, self.block_size)
        first_v_column = 0 if self.num_v_parts == 1 else lax.axis_index("v_part") * self.v_width

        def boxes_of(kv_tile_idx):  # noqa: ANN001, ANN202
            """The pieces of the cache that form a K tile, as indices of (block, half, KV head)."""
            boxes = []
            for copy in range(self.copies_per_tile):
                first_key = kv_tile_idx * config.kv_tile + copy * keys_per_copy
                block_idx = lax.div(first_key, jnp.int32(self.block_size))
                # Past the sequence's end and left of the first seen key, a table holds garbage.
                block_idx = jnp.minimum(block_idx, self.max_blocks_per_req - 1)
                block_id = tables_ref[plan(PlanField.REQ_IDX), block_idx]
                block_id = jnp.minimum(jnp.maximum(block_id, 0), self.num_blocks - 1)
                boxes.append((first_block + block_id) * (2 * self.num_kv_heads) + kv_head)
            return boxes

        def copy_tile(boxes, columns, kv_tile_idx, tile_ref, barrier):  # noqa: ANN001, ANN202
            # The part to read of a block that is longer than a tile: with blocks of 256 and tiles
            # of 128, odd tiles are the second half.
            tile_of_block = lax.rem(
                kv_tile_idx, jnp.int32(max(1, self.block_size // config.kv_tile))
            )
            for copy, box in enumerate(boxes):
                first_row = 0
                if keys_per_copy < self.block_size:
                    first_row = tile_of_block * config.kv_tile
                source = kv_ref.at[box, pl.ds(first_row, keys_per_copy), columns]
                target = tile_ref.at[pl.ds(copy * keys_per_copy, keys_per_copy)]
                plgpu.copy_gmem_to_smem(source, target, barrier)

        @pl.loop(0, num_steps)
        def _copy_step(step):  # noqa: ANN001, ANN202
            stage = lax.rem(step, jnp.int32(config.num_stages))
            kv_tile_idx = self._kv_tile_at(plan, step)
            boxes = boxes_of(kv_tile_idx)

            @pl.when(step >= config.num_stages)
            def _wait_for_free_k():  # noqa: ANN202
                plgpu.barrier_wait(smem["k_free"].at[stage])

            copy_tile(
                *(boxes, pl.ds(0, self.head_dim), kv_tile_idx),
                *(smem["k_ring"].at[stage], smem["k_landed"].at[stage]),
            )

            @pl.when(step >= config.num_stages)
            def _wait_for_free_v():  # noqa: ANN202
                plgpu.barrier_wait(smem["v_free"].at[stage])

            # In a block, the keys of all heads come before the values.
            boxes = [box + self.num_kv_heads for box in boxes]
            copy_tile(
                *(boxes, pl.ds(first_v_column, self.v_width), kv_tile_idx),
                *(smem["v_ring"].at[stage], smem["v_landed"].at[stage]),
            )

        # A warpgroup must wait for every phase of a barrier, the last ones included.
        @pl.loop(jnp.maximum(0, num_steps - config.num_stages), num_steps)
        def _wait_for_the_last(step):  # noqa: ANN001, ANN202
            stage = lax.rem(step, jnp.int32(config.num_stages))
            plgpu.barrier_wait(smem["k_free"].at[stage])
            plgpu.barrier_wait(smem["v_free"].at[stage])


def _tiled(swizzle: int, dtype: jnp.dtype) -> tuple[object, ...]:
    """The transforms of a tile in shared memory that wgmma reads, with `swizzle` in bytes."""
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _v_swizzle(kv_tile: int, v_width: int, dtype: jnp.dtype) -> int:
    """Bytes of the swizzle of a V tile. wgmma sums keys in groups of this width."""
    widest = plgpu.find_swizzle(v_width * dtype.itemsize * 8)
    return min(widest, kv_tile * dtype.itemsize)


def _tanh(x: jax.Array) -> jax.Array:  # f32[...], both
    """tanh(x) = 1 - 2 / (exp(2 x) + 1), by the hardware's exponential and inverse square root.

    The hardware's tanh has 11 correct bits, which a cap of 50 turns into errors of 0.02. A division
    would be exact, but takes many instructions.
    """
    root = lax.rsqrt(jnp.exp2(x * (2 * LOG2_E)) + 1)
    return 1 - 2 * root * root


def _zero_rows_outside(tile_ref, start, end):  # noqa: ANN001, ANN202
    """Sets the rows of a V tile (f[kv_tile, head_dim], in SMEM) outside [start, end) to zero.

    Works in pieces of 64 rows by the widest swizzle, so that a piece needs few registers. A tile of
    32 rows is cleared as its transpose, because a layout in registers has 64 rows.
    """
    num_rows, num_columns = tile_ref.shape
    width = plgpu.find_swizzle(num_columns * tile_ref.dtype.itemsize * 8) // tile_ref.dtype.itemsize
    is_turned = num_rows < ROWS_PER_WARPGROUP
    layout = plgpu.Layout.WGMMA_TRANSPOSED if is_turned else plgpu.Layout.WGMMA
    piece_rows = min(num_rows, ROWS_PER_WARPGROUP)
    for first_row in range(0, num_rows, piece_rows):
        for first_column in range(0, num_columns, width):
            piece_ref = tile_ref.at[pl.ds(first_row, piece_rows), pl.ds(first_column, width)]
            if is_turned:
                piece_ref = piece_ref.transpose((1, 0))
            row = first_row + plgpu.broadcasted_iota(
                jnp.int32, piece_ref.shape, int(is_turned), layout=layout
            )
            piece = plgpu.load(piece_ref, layout=layout)
            piece_ref[...] = jnp.where((row >= start) & (row < end), piece, jnp.zeros_like(piece))
    plgpu.commit_smem()
