"""Each array of a state has a dtype of its own in memory, whatever the dtype of the pages."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerState
from models.head_split import HeadRange, HeadSplit
from tests import on_device

# Three of a window, whose 15 numbers fill no whole words of 32 bits if they have 16; and a state.
SHAPES = ((3, 5), (2, 4, 4))


def make_format(window_dtype="float32", state_dtype="float32"):
    return StateFormat(
        shapes=SHAPES, num_windows=1, window_dtype=window_dtype, state_dtype=state_dtype
    )


@pytest.mark.parametrize(
    ("window_dtype", "state_dtype", "num_bytes", "num_pages"),
    [
        ("float32", "float32", 60 + 128, 1 + 2),
        ("bfloat16", "float32", 32 + 128, 1 + 2),
        ("float32", "float16", 60 + 64, 1 + 1),
        ("bfloat16", "bfloat16", 32 + 64, 1 + 1),
    ],
)
def test_bytes_of_a_slot_follow_from_both_dtypes(window_dtype, state_dtype, num_bytes, num_pages):
    cache = make_format(window_dtype, state_dtype)
    assert cache.content_bytes(16) == num_bytes
    assert (cache.num_pages(64), cache.num_pages(num_bytes)) == (num_pages, 1)


STORED = [
    ("uint16", (), False),
    ("uint16", (), True),
    ("float32", (), False),
    ("float32", (), True),
    ("uint16", (8,), False),
]
PAGE_BYTES = [64, 96, 512]
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]


def product_of_cases():
    """All combinations. The normal run has each pair of values from two of the three lists.

    In pages with lines, float32 states are written as halves. The normal run has these with each
    size of pages.
    """
    for (i, stored), (j, page_bytes), (k, dtypes) in itertools.product(
        *map(enumerate, (STORED, PAGE_BYTES, DTYPES))
    ):
        is_normal = (i + j + k) % 3 == 0 or (stored[1] and dtypes[1] == "float32")
        marks = () if is_normal else pytest.mark.slow
        yield pytest.param(*dtypes, page_bytes, *stored, marks=marks)


@pytest.mark.parametrize(
    ("window_dtype", "state_dtype", "page_bytes", "stored", "lanes", "fuses_writes"),
    list(product_of_cases()),
)
def test_arrays_are_read_as_they_were_rounded(
    window_dtype, state_dtype, page_bytes, stored, lanes, fuses_writes
):
    """With `lanes`, pages are lines of 8 words, and the window fills no whole lines.

    The lowest halves of float32 states then fill one of two pages, or two thirds of it.
    """
    cache = make_format(window_dtype, state_dtype)
    num_pages = cache.num_pages(page_bytes)
    slots = 1 + np.random.default_rng(0).permutation(3 * num_pages).reshape(3, num_pages)
    state = LayerState(
        format=cache,
        row=1,
        read_slots=on_device.array(slots, jnp.int32),
        write_slots=on_device.array(slots, jnp.int32),
        starts_from_zero=on_device.array([False, True, False]),
        is_written=on_device.array([True, True, False]),
        query_start_loc=on_device.arange(4, dtype=jnp.int32),
        has_one_token_each=True,
        fuses_writes=fuses_writes,
    )
    num_words = page_bytes // jnp.dtype(stored).itemsize
    pages_np = np.full((2, 10, num_words // math.prod(lanes), *lanes), 7, stored)
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(3, *shape)).astype(np.float32) for shape in SHAPES]

    @jax.jit
    def write_and_read(pages, arrays):
        pages = cache.write(pages, state, arrays)
        return pages, cache.read(pages, state)

    pages, found = write_and_read(pages_np, arrays)
    for array_np, got, dtype in zip(arrays, found, (window_dtype, state_dtype), strict=True):
        assert got.dtype == jnp.float32
        rounded = array_np.astype(jnp.dtype(dtype)).astype(np.float32)
        np.testing.assert_array_equal(got[0], rounded[0])
        assert not np.any(got[1])
    # The third request writes nothing, and no other row of the pages changes.
    unwritten = np.asarray(pages)[1, slots[2]]
    np.testing.assert_array_equal(unwritten, pages_np[1, slots[2]])
    np.testing.assert_array_equal(np.asarray(pages)[0], pages_np[0])


def test_each_device_has_the_heads_of_a_window_and_of_a_state():
    heads = HeadRange(num_heads=4, head_dim=4)
    shared = HeadRange(num_heads=1, head_dim=2)
    channels = HeadSplit(ranges=(heads, shared), heads_of_layer=(4, 1))
    by_head = HeadSplit(ranges=(HeadRange(num_heads=4, head_dim=1),), heads_of_layer=(4, 1))
    cache = StateFormat(
        shapes=((3, 18), (4, 4, 8)), num_windows=1, heads=((1, channels), (0, by_head))
    )
    own = cache.on_each_of(4)
    assert own.shapes == ((3, 4 + 2), (1, 4, 8))
    assert own.on_each_of(4) == own
    assert cache.on_each_of(3).shapes == cache.shapes
