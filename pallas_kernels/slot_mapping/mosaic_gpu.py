"""Mosaic GPU body of `slot_mapping`: one thread per token, search and look-up in one kernel.

In each step of the search, every thread reads a different array element. Pallas loads boxes, not
single elements, so these loads and the store are written one level below (`inline_mgpu`).

Compiled for an H200, this op is one kernel. Plain XLA needs three, because the unrolled search is
too long for one fusion. This body is preferred because it saves two launches; the gain was not
measured.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.cache_layout import INT32_MAX
from pallas_kernels.tma_boxes import MAX_GRID_YZ, WARPGROUP_THREADS

_ONE_A_THREAD = plgpu.Layout.WG_STRIDED((WARPGROUP_THREADS,), vec_size=1)


def misfit(
    positions: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    **options: int,
) -> str | None:
    """Why the kernel cannot map these tokens; None if it can."""
    if 0 in (positions.size, block_tables.size):
        return "an array is empty"
    num_groups = positions.shape[0]
    if num_groups > MAX_GRID_YZ or max(positions.size, block_tables.size) > INT32_MAX:
        return f"indices are int32, and the grid has at most {MAX_GRID_YZ} groups"
    return None


def slot_mapping_mosaic_gpu(
    positions: jax.Array,  # i32[num_groups, num_tokens]
    block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    block_size: int,
    pad_slot: int,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """See `api.slot_mapping`."""
    num_groups, num_tokens = positions.shape
    _, num_reqs, max_blocks_per_req = block_tables.shape
    load_each, store_each = (
        (_load_each_simulated, _store_each_simulated) if interpret else (_load_each, _store_each)
    )

    def map_tile(
        positions_ref: jax.Ref,  # i32[num_groups * num_tokens]
        block_tables_ref: jax.Ref,  # i32[num_groups * num_reqs * max_blocks_per_req]
        query_start_loc_ref: jax.Ref,  # i32[num_reqs + 1]
        slots_ref: jax.Ref,  # i32[num_groups * num_tokens]
    ) -> None:
        group_idx, tile_idx = lax.axis_index("group"), lax.axis_index("tile")
        thread_idx = plgpu.broadcasted_iota(
            jnp.int32, (WARPGROUP_THREADS,), 0, layout=_ONE_A_THREAD
        )
        # Threads past the end repeat the last token, and write the same slot to its place.
        token_idx = jnp.minimum(tile_idx * WARPGROUP_THREADS + thread_idx, num_tokens - 1)
        place = group_idx * num_tokens + token_idx
        # Padding may hold anything; a negative position must not become an index.
        position = jnp.maximum(load_each(positions_ref, place), 0)

        # A binary search for the number of requests that end at or before the token, num_reqs for
        # padding. It sets the highest bit first: with 5 requests the steps are 4, 2, 1.
        # The cast gives the constant a layout, which `inline_mgpu` needs.
        req_idx = plgpu.layout_cast(jnp.zeros_like(token_idx), _ONE_A_THREAD)
        for step in (1 << bit for bit in reversed(range(num_reqs.bit_length()))):
            end = load_each(query_start_loc_ref, jnp.minimum(req_idx + step, num_reqs))
            has_ended = (req_idx + step <= num_reqs) & (end <= token_idx)
            req_idx = jnp.where(has_ended, req_idx + step, req_idx)

        # Truncating division: the position is not negative.
        offset = lax.rem(position, jnp.full_like(position, block_size))
        logical_block = lax.div(position, jnp.full_like(position, block_size))
        logical_block = jnp.minimum(logical_block, max_blocks_per_req - 1)
        table_row = group_idx * num_reqs + jnp.minimum(req_idx, num_reqs - 1)
        block_id = load_each(block_tables_ref, table_row * max_blocks_per_req + logical_block)
        slots = jnp.where(req_idx < num_reqs, block_id * block_size + offset, pad_slot)
        store_each(slots_ref, place, slots)

    (slots,) = plgpu.kernel(
        map_tile,
        out_type=(jax.ShapeDtypeStruct((num_groups * num_tokens,), jnp.int32),),
        # The last axis is CUDA's x, the only one that may exceed 65,535.
        grid=(num_groups, pl.cdiv(num_tokens, WARPGROUP_THREADS)),
        grid_names=("group", "tile"),
        kernel_name="slot_mapping",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(positions.reshape(-1), block_tables.reshape(-1), query_start_loc)
    return slots.reshape(num_groups, num_tokens)


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), _ONE_A_THREAD),
    return_type=plgpu.ShapeDtypeStruct((WARPGROUP_THREADS,), jnp.int32, layout=_ONE_A_THREAD),
)
def _load_each(
    ctx: mgpu.LaunchContext,
    ref: ir.Value,  # i32[num_elements], in GMEM
    idx: mgpu.FragmentedArray,  # i32[128], in [0, num_elements)
) -> mgpu.FragmentedArray:  # i32[128]
    """Each thread loads the element of its own index."""

    def load(i: ir.Value, _: object) -> ir.Value:
        return memref.load(ref, [arith.index_cast(ir.IndexType.get(), i)])

    return idx.foreach(load, create_array=True, is_signed=True)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ONE_A_THREAD, _ONE_A_THREAD))
def _store_each(
    ctx: mgpu.LaunchContext,
    ref: ir.Value,  # i32[num_elements], in GMEM
    idx: mgpu.FragmentedArray,  # i32[128], in [0, num_elements)
    values: mgpu.FragmentedArray,  # i32[128]
) -> None:
    """Each thread stores its value at its own index."""
    places: list[ir.Value] = []
    idx.foreach(lambda i, _: places.append(arith.index_cast(ir.IndexType.get(), i)))
    rest = iter(places)
    values.foreach(lambda value, _: memref.store(value, ref, [next(rest)]))


# Interpret mode cannot run `inline_mgpu`. These make the same two accesses for it.
def _load_each_simulated(ref: jax.Ref, idx: jax.Array) -> jax.Array:
    return ref[...][idx]


def _store_each_simulated(ref: jax.Ref, idx: jax.Array, values: jax.Array) -> None:
    @pl.loop(0, WARPGROUP_THREADS)
    def _(thread_idx: jax.Array) -> None:
        ref[idx[thread_idx]] = values[thread_idx]
