"""Kernel body of ragged paged attention on a TPU: computes one pass.

One grid step is one pass (see `mosaic_tpu_plan.py`). It multiplies its tokens' rows of Q, for all
KV heads, with the request's keys, one KV tile at a time. A KV tile is a few blocks. One copy from
HBM loads the keys and values of all heads of a block. There are two buffers: while one tile is
multiplied, the next is copied, across the boundaries of passes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.async_copy import AsyncCopy
from pallas_kernels.paged_attention.mosaic_tpu_plan import ROW_TILE, PassField, TilePlan

# Value of masked logits and of empty running maxima. Finite, because -inf minus -inf is NaN.
MASKED_LOGIT = -1e30
# The parts of a block.
KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRules:
    """Static arguments of the op that change the arithmetic."""

    scale: float
    is_causal: bool
    sliding_window: int | None
    chunk_size: int | None
    soft_cap: float | None
    max_query_len: int | None


class KernelRefs(NamedTuple):
    """The refs of one launch, in the order in which Pallas passes them."""

    # Scalars, in SMEM.
    row: jax.Ref  # i32[1]
    num_passes: jax.Ref  # i32[1]
    passes: jax.Ref  # i32[num_fields, max_passes]
    # In HBM.
    block_tables: jax.Ref  # i32[num_reqs, 1, max_blocks_per_req]
    kv_cache: jax.Ref  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    # The pass's query tile, in VMEM.
    q: jax.Ref  # f[num_kv_heads, tile_rows, head_dim]
    out: jax.Ref  # f[num_kv_heads, tile_rows, head_dim]
    lse: jax.Ref  # f32[1, num_kv_heads, 1, tile_rows]
    # Scratch.
    kv_tiles: jax.Ref  # [2, tile_blocks, 2 (keys, values), num_kv_heads, block_size, head_dim]
    tables: jax.Ref  # i32[2, 1, max_blocks_per_req] in SMEM
    slot: jax.Ref  # i32[1] in SMEM, which of the two KV tiles comes next
    weighted_values: jax.Ref  # f32[num_kv_heads, tile_rows, head_dim]
    # One number per row, the same in every lane.
    largest: jax.Ref  # f32[num_kv_heads, tile_rows, 128]
    denominator: jax.Ref  # f32[num_kv_heads, tile_rows, 128]
    lse_column: jax.Ref  # f32[num_kv_heads, tile_rows, 128]
    kv_sems: jax.Ref  # one DMA semaphore per KV tile
    table_sems: jax.Ref  # one per table


def attend_pass(*refs: jax.Ref, plan: TilePlan, rules: AttentionRules) -> None:
    """One grid step: computes one pass, and starts the first copies of the next."""
    refs = KernelRefs(*refs)
    copies = _Copies(refs, plan)
    pass_idx = pl.program_id(0)
    num_passes = refs.num_passes[0]

    @pl.when((pass_idx == 0) & (num_passes > 0))
    def _start_the_pipeline() -> None:
        refs.slot[0] = 0
        copies.table(0).start()
        copies.table(0).wait()
        copies.start_tile(0, copies.first_tile(0), slot=0)

    @pl.when(pass_idx < num_passes)
    def _attend() -> None:
        tile = refs.passes[PassField.TILE, pass_idx]
        after = refs.passes[PassField.TILE, jnp.minimum(pass_idx + 1, num_passes - 1)]
        is_last_pass = pass_idx == num_passes - 1

        @pl.when(jnp.logical_not(is_last_pass))
        def _fetch_next_table() -> None:
            copies.table(pass_idx + 1).start()

        _in_window(refs, plan, rules, pass_idx, _empty_softmax)
        first_tile, end_tile = copies.first_tile(pass_idx), copies.end_tile(pass_idx)

        def add_tile(kv_tile: jax.Array, _: None) -> None:
            slot = refs.slot[0]
            has_next_here = kv_tile + 1 < end_tile

            @pl.when(has_next_here)
            def _start_next_tile() -> None:
                copies.start_tile(pass_idx, kv_tile + 1, slot=1 - slot)

            @pl.when(jnp.logical_not(has_next_here | is_last_pass))
            def _start_first_tile_of_next_pass() -> None:
                copies.table(pass_idx + 1).wait()
                copies.start_tile(pass_idx + 1, copies.first_tile(pass_idx + 1), slot=1 - slot)

            copies.wait_tile(pass_idx, kv_tile, slot)
            _clear_unwritten_values(refs, plan, pass_idx, kv_tile, slot)
            add = functools.partial(_add_kv_tile, kv_tile=kv_tile, slot=slot)
            _in_window(refs, plan, rules, pass_idx, add)
            refs.slot[0] = 1 - slot

        lax.fori_loop(first_tile, end_tile, add_tile, None)
        _in_window(refs, plan, rules, pass_idx, _merge_into_output)

        @pl.when(is_last_pass | (tile != after))
        def _write_lse() -> None:
            def write_head(head: jax.Array, _: None) -> None:
                # All lanes of a row are equal, so every row of the transpose is the column.
                refs.lse[0, head] = refs.lse_column[head].T[:1]

            lax.fori_loop(0, plan.num_kv_heads, write_head, None)


class _Copies:
    """The copies out of HBM: of a pass's block table, and of the blocks of a KV tile."""

    def __init__(self, refs: KernelRefs, plan: TilePlan) -> None:
        self._refs = refs
        self._plan = plan

    def first_tile(self, pass_idx: jax.Array | int) -> jax.Array:
        return self._refs.passes[PassField.FIRST_KEY, pass_idx] // self._plan.kv_tile_tokens

    def end_tile(self, pass_idx: jax.Array) -> jax.Array:
        """One past the last KV tile; a pass that sees no key has one tile without blocks."""
        end_key = self._refs.passes[PassField.END_KEY, pass_idx]
        end = pl.cdiv(end_key, self._plan.kv_tile_tokens)
        return jnp.maximum(end, self.first_tile(pass_idx) + 1)

    def table(self, pass_idx: jax.Array | int) -> AsyncCopy:
        req = self._refs.passes[PassField.REQ, pass_idx]
        slot = pass_idx % 2
        return pltpu.make_async_copy(
            self._refs.block_tables.at[req],
            self._refs.tables.at[slot],
            self._refs.table_sems.at[slot],
        )

    def start_tile(
        self, pass_idx: jax.Array | int, kv_tile: jax.Array, slot: jax.Array | int
    ) -> None:
        """Starts one copy per block. The pass's block table must have arrived."""

        def start(block: jax.Array, _: None) -> None:
            block_id = self._refs.tables[pass_idx % 2, 0, block]
            self._block(block_id, block, kv_tile, slot).start()

        lax.fori_loop(*self._blocks(pass_idx, kv_tile), start, None)

    def wait_tile(self, pass_idx: jax.Array, kv_tile: jax.Array, slot: jax.Array) -> None:
        def wait(block: jax.Array, _: None) -> None:
            # A wait only depends on the number of bytes, which is the same for all blocks.
            self._block(0, block, kv_tile, slot).wait()

        lax.fori_loop(*self._blocks(pass_idx, kv_tile), wait, None)

    def _blocks(self, pass_idx: jax.Array | int, kv_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The range of a tile's logical blocks that have a key seen by a token of the pass."""
        plan, passes = self._plan, self._refs.passes
        first = passes[PassField.FIRST_KEY, pass_idx] // plan.block_size
        end = pl.cdiv(passes[PassField.END_KEY, pass_idx], plan.block_size)
        tile_start = kv_tile * plan.tile_blocks
        return jnp.maximum(first, tile_start), jnp.minimum(end, tile_start + plan.tile_blocks)

    def _block(
        self,
        block_id: jax.Array | int,
        block: jax.Array,
        kv_tile: jax.Array,
        slot: jax.Array | int,
    ) -> AsyncCopy:
        refs = self._refs
        return pltpu.make_async_copy(
            refs.kv_cache.at[refs.row[0], pl.ds(2 * block_id, 2)],
            refs.kv_tiles.at[slot, block - kv_tile * self._plan.tile_blocks],
            refs.kv_sems.at[slot],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The rows of the query tile that a pass computes; some may belong to other requests."""

    refs: KernelRefs
    plan: TilePlan
    rules: AttentionRules
    pass_idx: jax.Array
    start: jax.Array | int
    num_rows: int

    def rows(self, head: jax.Array) -> tuple[jax.Array, pl.Slice]:
        """Index of the window in a ref whose first axes are head and row."""
        return head, pl.ds(self.start, self.num_rows)

    def field(self, field: PassField) -> jax.Array:
        return self.refs.passes[field, self.pass_idx]

    def token_of_pass(self) -> jax.Array:  # i32[num_rows, 1]
        """Each row's token of the pass; below 0 or past the last for rows of other requests."""
        row = self.start + lax.broadcasted_iota(jnp.int32, (self.num_rows, 1), 0)
        return row // self.plan.group_size - self.field(PassField.FIRST_TOKEN)


def _in_window(
    refs: KernelRefs,
    plan: TilePlan,
    rules: AttentionRules,
    pass_idx: jax.Array,
    work: Callable[[_Window], None],
) -> None:
    """Runs `work(window)` on the whole query tile, or on a few rows if the pass has one token."""

    def run(start: jax.Array | int, num_rows: int) -> None:
        work(
            _Window(
                refs=refs,
                plan=plan,
                rules=rules,
                pass_idx=pass_idx,
                start=start,
                num_rows=num_rows,
            )
        )

    if plan.window_rows == plan.tile_rows:
        run(0, plan.tile_rows)
        return
    is_one_token = refs.passes[PassField.NUM_TOKENS, pass_idx] == 1

    @pl.when(is_one_token)
    def _around_one_token() -> None:
        row = refs.passes[PassField.FIRST_TOKEN, pass_idx] * plan.group_size
        start = jnp.minimum(row // ROW_TILE * ROW_TILE, plan.tile_rows - plan.window_rows)
        run(pl.multiple_of(start, ROW_TILE), plan.window_rows)

    if rules.max_query_len != 1:

        @pl.when(jnp.logical_not(is_one_token))
        def _whole_tile() -> None:
            run(0, plan.tile_rows)


def _empty_softmax(window: _Window) -> None:
    refs = window.refs

    def empty_head(head: jax.Array, _: None) -> None:
        rows = window.rows(head)
        for ref, value in (
            (refs.largest, MASKED_LOGIT),
            (refs.denominator, 0.0),
            (refs.weighted_values, 0.0),
        ):
            ref[rows] = jnp.full((window.num_rows, ref.shape[-1]), value, jnp.float32)

    lax.fori_loop(0, window.plan.num_kv_heads, empty_head, None)


def _clear_unwritten_values(
    refs: KernelRefs, plan: TilePlan, pass_idx: jax.Array, kv_tile: jax.Array, slot: jax.Array
) -> None:
    """Zeroes values that no token sees: they may be NaN, and a weight of 0 times NaN is NaN.

    Only the first and the last tile of a pass can hold such values.
    """
    first_key = refs.passes[PassField.FIRST_KEY, pass_idx] - kv_tile * plan.kv_tile_tokens
    end_key = refs.passes[PassField.END_KEY, pass_idx] - kv_tile * plan.kv_tile_tokens

    @pl.when((first_key > 0) | (end_key < plan.kv_tile_tokens))
    def _clear() -> None:
        def clear_head(head: jax.Array, _: None) -> None:
            blocks = refs.kv_tiles[slot, :, VALUES, head]
            values = blocks.reshape(plan.kv_tile_tokens, -1)
            key = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            is_written = (key >= first_key) & (key < end_key)
            values = jnp.where(is_written, values, jnp.zeros_like(values))
            refs.kv_tiles[slot, :, VALUES, head] = values.reshape(blocks.shape)

        lax.fori_loop(0, plan.num_kv_heads, clear_head, None)


def _add_kv_tile(window: _Window, kv_tile: jax.Array, slot: jax.Array) -> None:
    """Adds one tile of keys to the running softmax of the window's rows."""
    refs, plan, rules = window.refs, window.plan, window.rules
    shape = (window.num_rows, plan.kv_tile_tokens)
    is_seen = _is_seen(window, kv_tile * plan.kv_tile_tokens, shape)

    def add_head(head: jax.Array, _: None) -> None:
        rows = window.rows(head)
        dtype = _product_dtype(refs)
        k, v = (
            refs.kv_tiles[slot, :, part, head].reshape(plan.kv_tile_tokens, -1).astype(dtype)
            for part in (KEYS, VALUES)
        )
        logits = _product(refs.q[rows].astype(dtype), k, contract=(1, 1))
        logits *= rules.scale
        if rules.soft_cap is not None:
            logits = rules.soft_cap * jnp.tanh(logits / rules.soft_cap)
        logits = jnp.where(is_seen, logits, MASKED_LOGIT)

        largest = jnp.maximum(refs.largest[rows], logits.max(axis=1, keepdims=True))
        rescale = jnp.exp(refs.largest[rows] - largest)
        # A row that has seen no key yet has equal logits, and exp alone would give 1.
        weights = jnp.where(is_seen, jnp.exp(logits - largest[:, :1]), 0.0)
        refs.largest[rows] = largest
        refs.denominator[rows] = refs.denominator[rows] * rescale + weights.sum(
            axis=1, keepdims=True
        )
        sums = _product(weights.astype(dtype), v, contract=(1, 0))
        refs.weighted_values[rows] = refs.weighted_values[rows] * rescale[:, :1] + sums

    lax.fori_loop(0, plan.num_kv_heads, add_head, None)


def _is_seen(window: _Window, first_key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Which keys of a tile each row sees, bool[num_rows, kv_tile_tokens]."""
    rules = window.rules
    key = first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
    if not rules.is_causal:
        return key < window.field(PassField.END_KEY)
    position = window.field(PassField.FIRST_POSITION) + window.token_of_pass()
    is_seen = key <= position
    if rules.sliding_window is not None:
        is_seen &= key > position - rules.sliding_window
    if rules.chunk_size is not None:
        is_seen &= key >= position // rules.chunk_size * rules.chunk_size
    return is_seen


def _product_dtype(refs: KernelRefs) -> jnp.dtype:
    """The dtype that K, V and Q are cast to: a float of at least Q's precision."""
    return jnp.result_type(refs.q.dtype, refs.kv_cache.dtype)


def _product(lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product accumulated in float32; float32 operands are not rounded to bfloat16."""
    return lax.dot_general(
        lhs,
        rhs,
        ((contract[:1], contract[1:]), ((), ())),
        precision=lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _merge_into_output(window: _Window) -> None:
    """Divides by the denominators, and writes only the rows of this request.

    No pass writes the rows of padding. The caller of the launch clears them.
    """
    refs = window.refs
    token = window.token_of_pass()
    is_own = (token >= 0) & (token < window.field(PassField.NUM_TOKENS))

    def merge_head(head: jax.Array, _: None) -> None:
        rows = window.rows(head)
        denominator = refs.denominator[rows]
        sees_any = denominator > 0
        safe = jnp.where(sees_any, denominator, 1.0)
        out = refs.weighted_values[rows] * (1.0 / safe[:, :1])
        lse = jnp.where(sees_any, refs.largest[rows] + jnp.log(safe), -jnp.inf)
        old = refs.out[rows].astype(jnp.float32)
        refs.out[rows] = jnp.where(is_own, out, old).astype(refs.out.dtype)
        refs.lse_column[rows] = jnp.where(is_own, lse, refs.lse_column[rows])

    lax.fori_loop(0, window.plan.num_kv_heads, merge_head, None)
