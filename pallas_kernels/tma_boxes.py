"""What one TMA copy can move, and how the Mosaic GPU memory ops cut arrays into such boxes.

TMA, the GPU's copy engine, moves a box: at most 256 elements along each axis, at most 5 axes, the
last one a multiple of 16 bytes; its place in shared memory starts at a multiple of 128 bytes.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cache_layout import INT32_MAX

MAX_BOX_DIM = 256
MINOR_BYTES = 16
SMEM_ALIGNMENT = 128
WARPGROUP_THREADS = 128
# A CTA's tiles in shared memory: six CTAs of this size share an SM, so that one's stores overlap
# another's loads. A guess, not measured.
CTA_TILE_BYTES = 32 * 1024
# Of an SM's 228 KiB one CTA may have 227; the rest of these 4 KiB are for barriers.
MAX_CTA_BYTES = 224 * 1024
# CUDA's limit of a grid's second and third axis.
MAX_GRID_YZ = 65_535
COPYABLE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChunks:
    """How the blocks of caches are cut into chunks, the same number for each cache.

    A block is contiguous, `num_kv_heads * block_size * head_dim` elements in a row, so a chunk is a
    run of them, and a cache is seen as `[num_rows * num_blocks * num_chunks, *box]`. A chunk is a
    multiple of 128 elements: one for each thread, and in shared memory the next one is aligned.
    """

    num_chunks: int
    boxes: tuple[tuple[int, int], ...]  # of each cache


def without_empty(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays that hold something: beside an MLA cache the V cache has `v_head_dim` 0."""
    return tuple(array for array in arrays if array.size)


def dtype_misfit(*arrays: jax.Array) -> str | None:
    """Why TMA cannot copy one of these arrays, by dtype; None if it can copy them all."""
    for array in arrays:
        if jnp.dtype(array.dtype).name not in COPYABLE_DTYPES:
            return f"it copies {', '.join(COPYABLE_DTYPES)}, got {array.dtype}"
    return None


def widest_minor(size: int, itemsize: int) -> int | None:
    """The largest last axis of a box that divides `size` elements; None if there is none.

    Example: 576 elements of bfloat16 are 3 times 192; 20 elements are 40 bytes, not in 16s.
    """
    for minor in range(min(size, MAX_BOX_DIM), 0, -1):
        if size % minor == 0 and minor * itemsize % MINOR_BYTES == 0:
            return minor
    return None


def blocks_misfit(
    caches: tuple[
        jax.Array, ...
    ],  # each [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    block_ids: jax.Array,  # i32[num_ids]
    max_bytes: tuple[int, ...],
) -> str | None:
    """Why TMA cannot copy blocks of these caches, cut by `cut_blocks`; None if it can."""
    if not caches or not block_ids.size:
        return "there is nothing to copy"
    if reason := dtype_misfit(*caches):
        return reason
    chunks = cut_blocks(caches, max_bytes)
    if chunks is None:
        blocks = " and ".join(f"{cache.dtype}{list(cache.shape[2:])}" for cache in caches)
        return (
            f"blocks of {blocks} cannot be cut into TMA boxes of at most {max_bytes[-1]} bytes "
            f"together (for {block_ids.size} block ids)"
        )
    num_rows, num_blocks = caches[0].shape[:2]
    most_blocks = num_rows * max(num_blocks, block_ids.size)
    if num_rows > MAX_GRID_YZ or most_blocks * chunks.num_chunks > INT32_MAX:
        return f"its indices are int32 and its grid has at most {MAX_GRID_YZ} rows, got {num_rows=}"
    return None


def cut_blocks(
    caches: tuple[
        jax.Array, ...
    ],  # each [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    max_bytes: tuple[int, ...],
) -> BlockChunks | None:
    """Cuts blocks into the fewest chunks whose bytes, of all caches together, are within a limit.

    Args:
        max_bytes: The limits, the wanted one first; a later one counts where no cut keeps to those
            before it.

    Returns:
        None if no cut keeps to the last limit.
    """
    block_bytes = [math.prod(cache.shape[2:]) * cache.dtype.itemsize for cache in caches]
    cuts = [
        BlockChunks(num_chunks=num_chunks, boxes=boxes)
        for num_chunks in range(1, min(block_bytes) // SMEM_ALIGNMENT + 1)
        if None not in (boxes := tuple(_box_of_chunk(cache, num_chunks) for cache in caches))
    ]
    for limit in max_bytes:
        for cut in cuts:
            if sum(block_bytes) <= limit * cut.num_chunks:
                return cut
    return None


def _box_of_chunk(cache: jax.Array, num_chunks: int) -> tuple[int, int] | None:
    chunk_size, rest = divmod(math.prod(cache.shape[2:]), num_chunks)
    if rest or chunk_size % WARPGROUP_THREADS:
        return None
    minor = widest_minor(chunk_size, cache.dtype.itemsize)
    if minor is None or chunk_size // minor > MAX_BOX_DIM:
        return None
    return chunk_size // minor, minor
