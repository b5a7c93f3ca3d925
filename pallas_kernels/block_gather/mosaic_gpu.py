"""Mosaic GPU body of `block_gather`: a CTA a chunk of a block, through shared memory by TMA."""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tma_boxes import (
    CTA_TILE_BYTES,
    WARPGROUP_THREADS,
    blocks_misfit,
    cut_blocks,
    without_empty,
)


def misfit(k_cache: jax.Array, v_cache: jax.Array, block_ids: jax.Array) -> str | None:
    """Why TMA cannot copy these blocks; None if it can."""
    return blocks_misfit(without_empty(k_cache, v_cache), block_ids, (CTA_TILE_BYTES,))


def block_gather_mosaic_gpu(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_gather`."""
    num_rows, num_blocks = k_cache.shape[:2]
    (num_ids,) = block_ids.shape
    caches = without_empty(k_cache, v_cache)
    chunks = cut_blocks(caches, (CTA_TILE_BYTES,))
    num_chunks = chunks.num_chunks

    def copy_chunk(
        cache_refs: tuple[jax.Ref, ...],  # [num_rows * num_blocks * num_chunks, *box], in GMEM
        block_ids_ref: jax.Ref,  # i32[num_ids], in GMEM
        blocks_refs: tuple[jax.Ref, ...],  # [num_rows * num_ids * num_chunks, *box], in GMEM
        in_smem: tuple[jax.Ref, ...],  # [*box], in SMEM
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        row, id_and_chunk = lax.axis_index("row"), lax.axis_index("id_and_chunk")
        block_id = block_ids_ref[lax.div(id_and_chunk, jnp.int32(num_chunks))]
        is_real = (block_id >= 0) & (block_id < num_blocks)

        @pl.when(is_real)
        def _() -> None:
            first = (row * num_blocks + block_id) * num_chunks
            source = first + lax.rem(id_and_chunk, jnp.int32(num_chunks))
            for cache_ref, chunk in zip(cache_refs, in_smem, strict=True):
                plgpu.copy_gmem_to_smem(cache_ref.at[source], chunk, has_arrived)
            plgpu.barrier_wait(has_arrived)

        @pl.when(jnp.logical_not(is_real))
        def _() -> None:
            for chunk in in_smem:
                chunk[...] = _zeros(chunk.shape, chunk.dtype)
            plgpu.commit_smem()

        target = row * (num_ids * num_chunks) + id_and_chunk
        for chunk, blocks_ref in zip(in_smem, blocks_refs, strict=True):
            plgpu.copy_smem_to_gmem(chunk, blocks_ref.at[target])
        # Shared memory must outlive the copies that read it; the kernel's end waits for the rest.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    (blocks,) = plgpu.kernel(
        copy_chunk,
        out_type=(
            tuple(
                jax.ShapeDtypeStruct((num_rows * num_ids * num_chunks, *box), cache.dtype)
                for box, cache in zip(chunks.boxes, caches, strict=True)
            ),
        ),
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
        kernel_name="block_gather",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(
        tuple(cache.reshape(-1, *box) for cache, box in zip(caches, chunks.boxes, strict=True)),
        block_ids,
    )
    taken = iter(blocks)
    return tuple(
        (next(taken) if cache.size else jnp.zeros(0, cache.dtype)).reshape(
            num_rows, num_ids, *cache.shape[2:]
        )
        for cache in (k_cache, v_cache)
    )


def _zeros(box: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Zeros in registers, in a layout that suits every box: JAX 0.11.2 infers one that may not.

    Example: a box [4, 160] gives each of 128 threads 5 elements, stored one by one; the inferred
    layout would store 4 at a time.
    """
    elements_a_thread = box[0] * box[1] // WARPGROUP_THREADS
    vec_size = math.gcd(elements_a_thread, 8 // jnp.dtype(dtype).itemsize)
    layout = plgpu.Layout.WG_STRIDED(box, vec_size=vec_size)
    return plgpu.layout_cast(jnp.zeros(box, dtype), layout)
