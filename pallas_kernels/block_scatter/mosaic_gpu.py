"""Mosaic GPU body of `block_scatter`: a CTA a chunk of a block, through shared memory by TMA."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tma_boxes import (
    CTA_TILE_BYTES,
    blocks_misfit,
    cut_blocks,
    without_empty,
)


def misfit(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    block_ids: jax.Array,
) -> str | None:
    """Why TMA cannot copy these blocks; None if it can."""
    return blocks_misfit(without_empty(k_cache, v_cache), block_ids, (CTA_TILE_BYTES,))


def block_scatter_mosaic_gpu(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, head_dim]
    v_blocks: jax.Array,  # [num_rows, num_ids, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_scatter`."""
    num_rows, num_blocks = k_cache.shape[:2]
    (num_ids,) = block_ids.shape
    caches = without_empty(k_cache, v_cache)
    chunks = cut_blocks(caches, (CTA_TILE_BYTES,))
    num_chunks = chunks.num_chunks

    def copy_chunk(
        blocks_refs: tuple[jax.Ref, ...],  # [num_rows * num_ids * num_chunks, *box], in GMEM
        block_ids_ref: jax.Ref,  # i32[num_ids], in GMEM
        cache_refs: tuple[jax.Ref, ...],  # [num_rows * num_blocks * num_chunks, *box], in GMEM
        in_smem: tuple[jax.Ref, ...],  # [*box], in SMEM
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        row, id_and_chunk = lax.axis_index("row"), lax.axis_index("id_and_chunk")
        block_id = block_ids_ref[lax.div(id_and_chunk, jnp.int32(num_chunks))]

        @pl.when((block_id >= 0) & (block_id < num_blocks))
        def _() -> None:
            source = row * (num_ids * num_chunks) + id_and_chunk
            for blocks_ref, chunk in zip(blocks_refs, in_smem, strict=True):
                plgpu.copy_gmem_to_smem(blocks_ref.at[source], chunk, has_arrived)
            plgpu.barrier_wait(has_arrived)
            first = (row * num_blocks + block_id) * num_chunks
            target = first + lax.rem(id_and_chunk, jnp.int32(num_chunks))
            for chunk, cache_ref in zip(in_smem, cache_refs, strict=True):
                plgpu.copy_smem_to_gmem(chunk, cache_ref.at[target])
            # Shared memory must outlive the copies that read it; the kernel's end waits for the
            # rest.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    cache_refs, blocks = (
        tuple(array.reshape(-1, *box) for array, box in zip(arrays, chunks.boxes, strict=True))
        for arrays in (caches, without_empty(k_blocks, v_blocks))
    )
    cache_refs = tuple(map(jax.new_ref, cache_refs))
    plgpu.kernel(
        copy_chunk,
        out_type=(),
        scratch_types=[
            tuple(
                plgpu.SMEM(box, cache.dtype)
                for box, cache in zip(chunks.boxes, caches, strict=True)
            ),
            plgpu.Barrier(num_arrivals=len(caches)),
        ],
        # The last axis is CUDA's x, the only one that may exceed 65,535.
        grid=(num_rows, num_ids * num_chunks),
        grid_names=("row", "id_and_chunk"),
        kernel_name="block_scatter",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(blocks, block_ids, cache_refs)
    written = map(jax.freeze, cache_refs)
    return tuple(
        next(written).reshape(cache.shape) if cache.size else cache for cache in (k_cache, v_cache)
    )
