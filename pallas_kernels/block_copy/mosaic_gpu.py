"""Mosaic GPU body of `block_copy`: a CTA reads one chunk of all source blocks, then writes.

Every block is cut into the same chunks. A CTA makes all copies of one chunk of one row. No CTA
reads memory that another CTA writes, so each must only finish its own reads before it writes. This
needs no second kernel and no buffer in device memory.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tma_boxes import (
    CTA_TILE_BYTES,
    MAX_CTA_BYTES,
    blocks_misfit,
    cut_blocks,
)

# Copies of smaller chunks would be inefficient. A guess, not measured.
_SMALL_CHUNK_BYTES = 2048


def misfit(
    pages: jax.Array, source_block_ids: jax.Array, target_block_ids: jax.Array
) -> str | None:
    """Why TMA cannot copy these blocks; None if it can."""
    del target_block_ids
    return blocks_misfit(pages, source_block_ids, _chunk_bytes(source_block_ids.size))


def block_copy_mosaic_gpu(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """See `api.block_copy`."""
    num_rows, num_blocks = pages.shape[:2]
    (num_copies,) = source_block_ids.shape
    chunks = cut_blocks(pages, _chunk_bytes(num_copies))
    num_chunks = chunks.num_chunks

    def copy_chunk(
        sources_ref: jax.Ref,  # i32[num_copies], in GMEM
        targets_ref: jax.Ref,  # i32[num_copies], in GMEM
        pages_ref: jax.Ref,  # [num_rows * num_blocks * num_chunks, *box], in GMEM
        in_smem: jax.Ref,  # [num_copies, *box]
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        first_block, chunk = lax.axis_index("row") * num_blocks, lax.axis_index("chunk")

        def is_real(i: jax.Array) -> jax.Array:
            return (targets_ref[i] >= 0) & (targets_ref[i] < num_blocks)

        @pl.loop(0, num_copies)
        def _(i: jax.Array) -> None:
            @pl.when(is_real(i))
            def _() -> None:
                source = (first_block + sources_ref[i]) * num_chunks + chunk
                plgpu.copy_gmem_to_smem(pages_ref.at[source], in_smem.at[i], has_arrived)

            @pl.when(jnp.logical_not(is_real(i)))
            def _() -> None:
                plgpu.barrier_arrive(has_arrived)  # the barrier counts padding too

        plgpu.barrier_wait(has_arrived)
        # All reads have finished. The race detector of interpret mode requires this fence between a
        # TMA load and a TMA store of the same global memory. It costs little.
        plgpu.commit_smem()

        @pl.loop(0, num_copies)
        def _(i: jax.Array) -> None:
            @pl.when(is_real(i))
            def _() -> None:
                target = (first_block + targets_ref[i]) * num_chunks + chunk
                plgpu.copy_smem_to_gmem(in_smem.at[i], pages_ref.at[target])

        # The copies must have read shared memory here; the kernel's end waits for their writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pages_ref = jax.new_ref(pages.reshape(-1, *chunks.box))
    plgpu.kernel(
        copy_chunk,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((num_copies, *chunks.box), pages.dtype),
            plgpu.Barrier(num_arrivals=num_copies),
        ],
        # The last axis is CUDA's x, the only one that may exceed 65,535.
        grid=(num_rows, num_chunks),
        grid_names=("row", "chunk"),
        kernel_name="block_copy",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(source_block_ids, target_block_ids, pages_ref)
    return jax.freeze(pages_ref).reshape(pages.shape)


def _chunk_bytes(num_copies: int) -> tuple[int, ...]:
    """Size limits of a chunk, best first; a CTA holds `num_copies` chunks.

    Each limit doubles the one before it, up to what fits in a CTA. Example for 40 copies: 2 KiB,
    then 4 KiB, then 5,734 bytes.
    """
    most = MAX_CTA_BYTES // max(num_copies, 1)
    wanted = max(CTA_TILE_BYTES // max(num_copies, 1), _SMALL_CHUNK_BYTES)
    limits = []
    while wanted < most:
        limits.append(wanted)
        wanted *= 2
    return *limits, most
