"""Mosaic GPU body of `block_gather`: each CTA copies one chunk of a block by TMA."""

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
)


def misfit(pages: jax.Array, block_ids: jax.Array) -> str | None:
    """Why TMA cannot copy these blocks; None if it can."""
    return blocks_misfit(pages, block_ids, (CTA_TILE_BYTES,))


def block_gather_mosaic_gpu(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:  # [num_rows, num_ids, ...]
    """See `api.block_gather`."""
    num_rows, num_blocks = pages.shape[:2]
    (num_ids,) = block_ids.shape
    chunks = cut_blocks(pages, (CTA_TILE_BYTES,))
    num_chunks = chunks.num_chunks

    def copy_chunk(
        pages_ref: jax.Ref,  # [num_rows * num_blocks * num_chunks, *box], in GMEM
        block_ids_ref: jax.Ref,  # i32[num_ids], in GMEM
        values_ref: jax.Ref,  # [num_rows * num_ids * num_chunks, *box], in GMEM
        in_smem: jax.Ref,  # [*box]
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        row, id_and_chunk = lax.axis_index("row"), lax.axis_index("id_and_chunk")
        block_id = block_ids_ref[lax.div(id_and_chunk, jnp.int32(num_chunks))]
        is_real = (block_id >= 0) & (block_id < num_blocks)

        @pl.when(is_real)
        def _() -> None:
            first = (row * num_blocks + block_id) * num_chunks
            source = first + lax.rem(id_and_chunk, jnp.int32(num_chunks))
            plgpu.copy_gmem_to_smem(pages_ref.at[source], in_smem, has_arrived)
            plgpu.barrier_wait(has_arrived)

        @pl.when(jnp.logical_not(is_real))
        def _() -> None:
            in_smem[...] = _zeros(in_smem.shape, in_smem.dtype)
            plgpu.commit_smem()

        target = row * (num_ids * num_chunks) + id_and_chunk
        plgpu.copy_smem_to_gmem(in_smem, values_ref.at[target])
        # The copies must have read shared memory here; the kernel's end waits for their writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    values = plgpu.kernel(
        copy_chunk,
        out_type=jax.ShapeDtypeStruct((num_rows * num_ids * num_chunks, *chunks.box), pages.dtype),
        scratch_types=[plgpu.SMEM(chunks.box, pages.dtype), plgpu.Barrier()],
        # The last axis is CUDA's x, the only one that may exceed 65,535.
        grid=(num_rows, num_ids * num_chunks),
        grid_names=("row", "id_and_chunk"),
        kernel_name="block_gather",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(pages.reshape(-1, *chunks.box), block_ids)
    return values.reshape(num_rows, num_ids, *pages.shape[2:])


def _zeros(box: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Zeros in registers, in a layout that fits every box. JAX 0.11.2 may infer a wrong layout.

    Example: a box [4, 160] gives each of 128 threads 5 elements, stored one by one; the inferred
    layout would store 4 at a time.
    """
    elements_a_thread = box[0] * box[1] // WARPGROUP_THREADS
    vec_size = math.gcd(elements_a_thread, 8 // jnp.dtype(dtype).itemsize)
    layout = plgpu.Layout.WG_STRIDED(box, vec_size=vec_size)
    return plgpu.layout_cast(jnp.zeros(box, dtype), layout)
