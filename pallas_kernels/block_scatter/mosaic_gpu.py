"""Mosaic GPU body of `block_scatter`: each CTA copies one chunk of a block by TMA."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tma_boxes import CTA_TILE_BYTES, blocks_misfit, cut_blocks


def misfit(pages: jax.Array, values: jax.Array, block_ids: jax.Array) -> str | None:
    """Why TMA cannot copy these blocks; None if it can."""
    del values
    return blocks_misfit(pages, block_ids, (CTA_TILE_BYTES,))


def block_scatter_mosaic_gpu(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    values: jax.Array,  # [num_rows, num_ids, ...]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """See `api.block_scatter`."""
    num_rows, num_blocks = pages.shape[:2]
    (num_ids,) = block_ids.shape
    chunks = cut_blocks(pages, (CTA_TILE_BYTES,))
    num_chunks = chunks.num_chunks

    def copy_chunk(
        values_ref: jax.Ref,  # [num_rows * num_ids * num_chunks, *box], in GMEM
        block_ids_ref: jax.Ref,  # i32[num_ids], in GMEM
        pages_ref: jax.Ref,  # [num_rows * num_blocks * num_chunks, *box], in GMEM
        in_smem: jax.Ref,  # [*box]
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        row, id_and_chunk = lax.axis_index("row"), lax.axis_index("id_and_chunk")
        block_id = block_ids_ref[lax.div(id_and_chunk, jnp.int32(num_chunks))]

        @pl.when((block_id >= 0) & (block_id < num_blocks))
        def _() -> None:
            source = row * (num_ids * num_chunks) + id_and_chunk
            plgpu.copy_gmem_to_smem(values_ref.at[source], in_smem, has_arrived)
            plgpu.barrier_wait(has_arrived)
            first = (row * num_blocks + block_id) * num_chunks
            target = first + lax.rem(id_and_chunk, jnp.int32(num_chunks))
            plgpu.copy_smem_to_gmem(in_smem, pages_ref.at[target])
            # The copies must have read shared memory here; the kernel's end waits for their writes.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pages_ref = jax.new_ref(pages.reshape(-1, *chunks.box))
    plgpu.kernel(
        copy_chunk,
        out_type=(),
        scratch_types=[plgpu.SMEM(chunks.box, pages.dtype), plgpu.Barrier()],
        # The last axis is CUDA's x, the only one that may exceed 65,535.
        grid=(num_rows, num_ids * num_chunks),
        grid_names=("row", "id_and_chunk"),
        kernel_name="block_scatter",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(values.reshape(-1, *chunks.box), block_ids, pages_ref)
    return jax.freeze(pages_ref).reshape(pages.shape)
