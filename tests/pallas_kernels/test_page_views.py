"""Tests of `page_views.py`; `tests/aot/test_tpu.py` shows that the views are free on a TPU."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_views import unview_pages, view_pages
from tests import on_device

NUM_ROWS, NUM_BLOCKS = 2, 3


def numbered(shape):
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def raw_shape(as_lines, num_parts, **sizes):
    num_words = num_parts * math.prod(sizes.values())
    page = (num_words // 128, 128) if as_lines else (num_words,)
    return (NUM_ROWS, NUM_BLOCKS, *page)


FORMS = [
    # As lines of 128 or as words, parts, KV heads, block size, head_dim.
    (True, 2, 3, 16, 128),
    (True, 2, 2, 24, 256),
    (True, 1, 1, 8, 640),
    (True, 2, 1, 32, 512),
    (False, 2, 3, 16, 128),
    (False, 2, 2, 24, 256),
    (False, 1, 1, 12, 36),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_element_lies_where_documented(form):
    as_lines, num_parts, num_kv_heads, block_size, head_dim = form
    sizes = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    raw_np = numbered(raw_shape(as_lines, num_parts, **sizes))
    view = np.asarray(view_pages(on_device.array(raw_np), num_parts=num_parts, **sizes))
    assert view.shape == (NUM_ROWS, num_parts * NUM_BLOCKS, num_kv_heads, block_size, head_dim)
    # Both sides of every border between tiles, and the ends.
    offsets = sorted({0, 1, 7, 8, 11, block_size - 1} & set(range(block_size)))
    dims = sorted({0, 1, 127, 128, 200, 255, 256, head_dim - 1} & set(range(head_dim)))
    places = itertools.product(
        *map(range, (NUM_ROWS, NUM_BLOCKS, num_parts, num_kv_heads)), offsets, dims
    )
    for row, block, part, head, offset, dim in places:
        head_idx = part * num_kv_heads + head
        if as_lines:
            tile = (head_idx * (block_size // 8) + offset // 8) * (head_dim // 128) + dim // 128
            wanted = raw_np[row, block, tile * 8 + offset % 8, dim % 128]
        else:
            wanted = raw_np[row, block, (head_idx * block_size + offset) * head_dim + dim]
        assert view[row, num_parts * block + part, head, offset, dim] == wanted


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unview_is_the_inverse_of_view(form):
    as_lines, num_parts, num_kv_heads, block_size, head_dim = form
    sizes = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    raw_np = numbered(raw_shape(as_lines, num_parts, **sizes))
    view = view_pages(on_device.array(raw_np), num_parts=num_parts, **sizes)
    np.testing.assert_array_equal(unview_pages(view, raw_np.shape), raw_np)


SIZES = {"num_parts": 2, "num_kv_heads": 2, "block_size": 16, "head_dim": 256}


@pytest.mark.parametrize(
    ("shape", "sizes", "reason"),
    [
        ((2, 3, 128, 128), {"num_parts": 3}, "num_parts must be 1 or 2: got 3"),
        ((2, 3, 256, 64), {}, r"wrong shape: got \[2, 3, 256, 64\], wanted .* or .*, 128\]"),
        ((2, 3), {}, "wrong shape"),
        ((2, 3, 48, 128), {"head_dim": 96}, "head_dim does not fill lines of 128: got 96"),
        ((2, 3, 96, 128), {"block_size": 12}, "block_size does not fill .*: got 12"),
        ((2, 3, 120, 128), {}, "got 15360 in pages of .*, wanted 16384 for 2 of"),
        ((2, 3, 16_000), {}, "got 16000 in pages of .*, wanted 16384"),
    ],
    ids=str,
)
def test_view_names_what_does_not_fit(shape, sizes, reason):
    with pytest.raises(ValueError, match=f"view_pages: .*{reason}"):
        view_pages(on_device.zeros(shape, jnp.int8), **(SIZES | sizes))


@pytest.mark.parametrize(
    ("view_shape", "shape", "reason"),
    [
        ((2, 6, 16, 256), (2, 3, 64, 128), "view has the wrong shape: got .* wanted .*head_dim"),
        ((2, 6, 2, 16, 256), (1, 6, 64, 128), "got .* wanted 1 rows and one or two times 6"),
        ((2, 6, 2, 16, 256), (2, 2, 192, 128), "got .* wanted 2 rows and one or two times 2"),
        ((2, 6, 2, 16, 256), (2, 6, 128, 64), "raw pages have the wrong shape"),
        ((2, 6, 2, 16, 256), (6,), "raw pages have the wrong shape"),
        ((2, 6, 2, 12, 256), (2, 6, 48, 128), "block_size does not fill"),
        ((2, 6, 2, 16, 256), (2, 3, 64, 128), "got 8192 in pages of .*, wanted 16384"),
    ],
    ids=str,
)
def test_unview_names_what_does_not_fit(view_shape, shape, reason):
    with pytest.raises(ValueError, match=f"unview_pages: .*{reason}"):
        unview_pages(on_device.zeros(view_shape, jnp.int8), shape)
