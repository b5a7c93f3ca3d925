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
# Shared memory for a CTA's tiles. Six such CTAs share an SM, so that the stores of one overlap the
# loads of another. A guess, not measured.
CTA_TILE_BYTES = 32 * 1024
# A CTA may use 227 of an SM's 228 KiB; 3 KiB of them are reserved for barriers.
MAX_CTA_BYTES = 224 * 1024
# CUDA's limit of a grid's second and third axis.
MAX_GRID_YZ = 65_535
COPYABLE_DTYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int32", "uint32", "int16", "uint16", "int8", "uint8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChunks:
    """How the blocks of an array of pages are cut into chunks.

    A block of one row is contiguous, and a chunk is a run of its elements. So the pages can be
    viewed as `[num_rows * num_blocks * num_chunks, *box]`. A chunk has a multiple of 128 elements,
    so all threads have the same number, and the next chunk is aligned in shared memory.
    """

    num_chunks: int
    box: tuple[int, int]


def dtype_misfit(dtype: jnp.dtype) -> str | None:
    """Why TMA cannot copy numbers of a dtype; None if it can."""
    if jnp.dtype(dtype).name not in COPYABLE_DTYPES:
        return f"TMA copies {', '.join(COPYABLE_DTYPES)}, got {dtype}"
    return None


def widest_minor(size: int, itemsize: int) -> int | None:
    """The largest last axis of a box that divides `size` elements; None if there is none.

    Example: 576 elements of bfloat16 are 3 times 192; 20 elements are 40 bytes, not n * 16.
    """
    for minor in range(min(size, MAX_BOX_DIM), 0, -1):
        if size % minor == 0 and minor * itemsize % MINOR_BYTES == 0:
            return minor
    return None


def blocks_misfit(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    block_ids: jax.Array,  # i32[num_ids]
    max_bytes: tuple[int, ...],
) -> str | None:
    """Why TMA cannot copy blocks of these pages, cut by `cut_blocks`; None if it can."""
    if not pages.size or not block_ids.size:
        return "there is nothing to copy"
    if reason := dtype_misfit(pages.dtype):
        return reason
    chunks = cut_blocks(pages, max_bytes)
    if chunks is None:
        return (
            f"blocks of {pages.dtype}{list(pages.shape[2:])} cannot be cut into TMA boxes of at "
            f"most {max_bytes[-1]} bytes (for {block_ids.size} block ids)"
        )
    num_rows, num_blocks = pages.shape[:2]
    most_blocks = num_rows * max(num_blocks, block_ids.size)
    if num_rows > MAX_GRID_YZ or most_blocks * chunks.num_chunks > INT32_MAX:
        return f"indices are int32, and the grid has at most {MAX_GRID_YZ} rows, got {num_rows=}"
    return None


def cut_blocks(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    max_bytes: tuple[int, ...],
) -> BlockChunks | None:
    """Cuts blocks into the fewest chunks of at most a limit of bytes.

    Args:
        max_bytes: The limits, best first. A limit is used if the earlier ones allow no cut.

    Returns:
        None if no limit allows a cut.
    """
    itemsize = pages.dtype.itemsize
    block_size = math.prod(pages.shape[2:])
    block_bytes = block_size * itemsize
    for limit in max_bytes:
        for num_chunks in range(-(-block_bytes // limit), block_bytes // SMEM_ALIGNMENT + 1):
            if box := _box_of_chunk(block_size, itemsize, num_chunks):
                return BlockChunks(num_chunks=num_chunks, box=box)
    return None


def _box_of_chunk(block_size: int, itemsize: int, num_chunks: int) -> tuple[int, int] | None:
    """One chunk of blocks of `block_size` elements as a box; None if no box can hold it."""
    chunk_size, rest = divmod(block_size, num_chunks)
    if rest or chunk_size % WARPGROUP_THREADS:
        return None
    minor = widest_minor(chunk_size, itemsize)
    if minor is None or chunk_size // minor > MAX_BOX_DIM:
        return None
    return chunk_size // minor, minor
