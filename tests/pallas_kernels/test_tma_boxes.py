"""Tests of `tma_boxes.py`: every box is one that TMA can move, and together they are the block."""

import itertools
import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tma_boxes import (
    CTA_TILE_BYTES,
    blocks_misfit,
    cut_blocks,
    widest_minor,
    without_empty,
)


def cache_of(num_kv_heads, block_size, head_dim, dtype="bfloat16", num_rows=2, num_blocks=10):
    dims = (num_rows, num_blocks, num_kv_heads, block_size, head_dim)
    return jax.ShapeDtypeStruct(dims, dtype)


def ids_of(num_ids):
    return jax.ShapeDtypeStruct((num_ids,), "int32")


@pytest.mark.parametrize(
    ("size", "itemsize", "wanted"),
    [(128, 2, 128), (256, 4, 256), (576, 2, 192), (512, 1, 256), (80, 2, 80), (72, 1, None)],
)
def test_the_widest_last_axis_by_hand(size, itemsize, wanted):
    assert widest_minor(size, itemsize) == wanted


def test_a_block_by_hand():
    # 8 heads x 16 tokens x 128 are 32 KiB of bfloat16, K and V 64 KiB: two chunks of 16 KiB each.
    cache = cache_of(8, 16, 128)
    chunks = cut_blocks((cache, cache), (CTA_TILE_BYTES,))
    assert (chunks.num_chunks, chunks.boxes) == (2, ((32, 256), (32, 256)))


def test_k_and_v_of_different_widths_have_the_same_number_of_chunks():
    chunks = cut_blocks((cache_of(1, 64, 576), cache_of(1, 64, 64)), (CTA_TILE_BYTES,))
    assert chunks.num_chunks * math.prod(chunks.boxes[0]) == 64 * 576
    assert chunks.num_chunks * math.prod(chunks.boxes[1]) == 64 * 64


def test_a_later_limit_counts_where_no_cut_keeps_to_the_first():
    # 9 * 128 elements are the least that 576 x 64 can be cut into beside 512 x 64: 4,352 bytes.
    k_cache, v_cache = cache_of(1, 64, 576), cache_of(1, 64, 512)
    assert cut_blocks((k_cache, v_cache), (4096,)) is None
    assert cut_blocks((k_cache, v_cache), (4096, 8192)).num_chunks == 32
    assert cut_blocks((k_cache, v_cache), (16_384, 4096)).num_chunks == 16


@settings(max_examples=100)
@given(
    num_kv_heads=st.integers(1, 16),
    block_size=st.integers(1, 256),
    head_dim=st.integers(1, 576),
    v_head_dim=st.integers(1, 576),
    dtypes=st.tuples(*[st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"])] * 2),
    max_bytes=st.sampled_from([(512,), (2048,), (2048, CTA_TILE_BYTES)]),
)
def test_chunks_are_boxes_that_make_up_the_block(
    num_kv_heads, block_size, head_dim, v_head_dim, dtypes, max_bytes
):
    caches = (
        cache_of(num_kv_heads, block_size, head_dim, dtypes[0]),
        cache_of(num_kv_heads, block_size, v_head_dim, dtypes[1]),
    )
    chunks = cut_blocks(caches, max_bytes)
    if chunks is None:
        assert blocks_misfit(caches, ids_of(3), max_bytes) is not None
        return
    total_bytes = 0
    for box, cache in zip(chunks.boxes, caches, strict=True):
        chunk_bytes = math.prod(box) * cache.dtype.itemsize
        assert chunks.num_chunks * math.prod(box) == math.prod(cache.shape[2:])
        assert max(box) <= 256
        assert box[-1] * cache.dtype.itemsize % 16 == 0
        assert chunk_bytes % 128 == 0
        total_bytes += chunk_bytes
    assert total_bytes <= max_bytes[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_every_usual_cache_fits(dtype):
    block_sizes, head_dims = (8, 16, 32, 64, 128, 256), (64, 80, 96, 128, 192, 256, 576)
    for sizes in itertools.product((1, 2, 8), block_sizes, head_dims):
        cache = cache_of(*sizes, dtype)
        assert blocks_misfit((cache, cache), ids_of(4), (CTA_TILE_BYTES,)) is None


@pytest.mark.parametrize(
    ("cache", "num_ids", "reason"),
    [
        (cache_of(2, 8, 64), 0, "there is nothing to copy"),
        (cache_of(2, 8, 64, "float64"), 3, "got float64"),
        (cache_of(2, 8, 64, "int32"), 3, "got int32"),
        (cache_of(1, 1, 64), 3, "cannot be cut into TMA boxes"),
        (cache_of(1, 8, 17), 3, "cannot be cut into TMA boxes"),
        (cache_of(2, 8, 64, num_rows=65_536), 3, "at most 65535 rows"),
        (cache_of(8, 16, 128, num_rows=2, num_blocks=2**29), 3, "its indices are int32"),
    ],
)
def test_what_does_not_fit_has_a_reason(cache, num_ids, reason):
    assert reason in blocks_misfit((cache, cache), ids_of(num_ids), (CTA_TILE_BYTES,))


def test_empty_arrays_are_left_out():
    k_cache, v_cache = cache_of(1, 64, 576), cache_of(1, 64, 0)
    assert without_empty(k_cache, v_cache) == (k_cache,)
    assert blocks_misfit(without_empty(v_cache), ids_of(3), (CTA_TILE_BYTES,)) is not None
