"""Tests of `tma_boxes.py`: every box is one that TMA can move, and together they are the block."""

import itertools
import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tma_boxes import (
    COPYABLE_DTYPES,
    CTA_TILE_BYTES,
    blocks_misfit,
    cut_blocks,
    widest_minor,
)


def pages_of(*block_dims, dtype="bfloat16", num_rows=2, num_blocks=10):
    return jax.ShapeDtypeStruct((num_rows, num_blocks, *block_dims), dtype)


def ids_of(num_ids):
    return jax.ShapeDtypeStruct((num_ids,), "int32")


@pytest.mark.parametrize(
    ("size", "itemsize", "wanted"),
    [(128, 2, 128), (256, 4, 256), (576, 2, 192), (512, 1, 256), (80, 2, 80), (72, 1, None)],
)
def test_the_widest_last_axis_by_hand(size, itemsize, wanted):
    assert widest_minor(size, itemsize) == wanted


def test_a_block_by_hand():
    # K and V of 8 heads x 16 tokens x 128 are 64 KiB of bfloat16: two chunks of 32 KiB.
    for block_dims in [(2, 8, 16, 128), (2 * 8 * 16 * 128,)]:
        chunks = cut_blocks(pages_of(*block_dims), (CTA_TILE_BYTES,))
        assert (chunks.num_chunks, chunks.box) == (2, (64, 256))


def test_a_later_limit_counts_where_no_cut_keeps_to_the_first():
    # 72 KiB of latents in chunks of a multiple of 128 numbers, so of at least 256 bytes.
    latents = pages_of(64, 576)
    assert cut_blocks(latents, (128,)) is None
    assert cut_blocks(latents, (128, 8192)).num_chunks == 9
    assert cut_blocks(latents, (16_384, 128)).num_chunks == 6


@settings(max_examples=100)
@given(
    block_dims=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    dtype=st.sampled_from(COPYABLE_DTYPES),
    max_bytes=st.sampled_from([(512,), (2048,), (2048, CTA_TILE_BYTES)]),
)
def test_chunks_are_boxes_that_make_up_the_block(block_dims, dtype, max_bytes):
    pages = pages_of(*block_dims, dtype=dtype)
    chunks = cut_blocks(pages, max_bytes)
    if chunks is None:
        assert blocks_misfit(pages, ids_of(3), max_bytes) is not None
        return
    chunk_bytes = math.prod(chunks.box) * pages.dtype.itemsize
    assert chunks.num_chunks * math.prod(chunks.box) == math.prod(block_dims)
    assert max(chunks.box) <= 256
    assert chunks.box[-1] * pages.dtype.itemsize % 16 == 0
    assert chunk_bytes % 128 == 0
    assert chunk_bytes <= max_bytes[-1]


@pytest.mark.parametrize("dtype", COPYABLE_DTYPES)
def test_every_usual_cache_fits(dtype):
    block_sizes, head_dims = (8, 16, 32, 64, 128, 256), (64, 80, 96, 128, 192, 256, 576)
    for sizes in itertools.product((1, 2, 4, 16), block_sizes, head_dims):
        pages = pages_of(math.prod(sizes), dtype=dtype)
        assert blocks_misfit(pages, ids_of(4), (CTA_TILE_BYTES,)) is None


@pytest.mark.parametrize(
    ("pages", "num_ids", "reason"),
    [
        (pages_of(2, 8, 64), 0, "there is nothing to copy"),
        (pages_of(2, 0, 64), 3, "there is nothing to copy"),
        (pages_of(2, 8, 64, num_blocks=0), 3, "there is nothing to copy"),
        (pages_of(2, 8, 64, dtype="float64"), 3, "got float64"),
        (pages_of(2, 8, 64, dtype="complex64"), 3, "got complex64"),
        (pages_of(64), 3, "bfloat16[64] cannot be cut into TMA boxes"),
        (pages_of(8, 17), 3, "cannot be cut into TMA boxes"),
        (pages_of(2, 8, 64, num_rows=65_536), 3, "at most 65535 rows"),
        (pages_of(2, 8, 16, 128, num_rows=2, num_blocks=2**29), 3, "indices are int32"),
    ],
    ids=str,
)
def test_what_does_not_fit_has_a_reason(pages, num_ids, reason):
    assert reason in blocks_misfit(pages, ids_of(num_ids), (CTA_TILE_BYTES,))
