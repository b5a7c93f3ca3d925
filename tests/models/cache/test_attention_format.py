"""A page of attention is its keys and then its values, in heads as wide as the page has room."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache.attention_format import AttentionFormat

FORMAT = AttentionFormat(num_kv_heads=4, head_dim=24, dtype="bfloat16")


def test_page_holds_keys_and_values_of_the_heads_of_one_device():
    # K and V, 4 heads of 24 numbers, 16 tokens, 2 bytes.
    assert FORMAT.page_bytes(16) == 2 * 4 * 24 * 16 * 2
    assert FORMAT.on_each_of(2).page_bytes(16) == 4 * 24 * 16 * 2
    assert dataclasses.replace(FORMAT, dtype="float32").page_bytes(16) == 2 * FORMAT.page_bytes(16)


@pytest.mark.parametrize(
    ("head_dim", "wanted"),
    [
        (24, 24),
        (32, 32),
        (40, 40),
        # Narrower than it needs, or no multiple of 16 bytes.
        (16, None),
        (28, None),
    ],
)
def test_larger_pages_are_filled_by_wider_heads(head_dim, wanted):
    page_bytes = 2 * 4 * head_dim * 16 * 2
    wide = FORMAT.with_page_bytes(page_bytes, 16)
    assert wide == (wanted and dataclasses.replace(FORMAT, head_dim=wanted))


def test_pages_that_no_width_fills_are_refused():
    assert FORMAT.with_page_bytes(2 * 4 * 32 * 16 * 2 + 2, 16) is None


def test_own_width_may_be_any():
    odd = AttentionFormat(num_kv_heads=1, head_dim=5, dtype="float32")
    assert odd.with_page_bytes(odd.page_bytes(16), 16) == odd


@pytest.mark.parametrize(("step", "wanted"), [(1, 24), (8, 24), (16, 32), (128, 128)])
def test_heads_are_widened_to_a_multiple_of_the_step(step, wanted):
    assert FORMAT.with_width_step(step) == dataclasses.replace(FORMAT, head_dim=wanted)


def test_view_has_the_keys_of_each_block_and_then_its_values():
    num_rows, num_blocks, block_size = 2, 3, 8
    page_np = np.arange(num_rows * num_blocks * 2 * 4 * block_size * 24, dtype=np.float32)
    page_np = page_np.reshape(num_rows, num_blocks, 2, 4, block_size, 24)
    pages = jnp.asarray(page_np.reshape(num_rows, num_blocks, -1))
    cache = dataclasses.replace(FORMAT, dtype="float32")
    view = cache.view(pages, block_size)
    assert view.shape == (num_rows, 2 * num_blocks, 4, block_size, 24)
    for part in range(2):
        np.testing.assert_array_equal(view[:, part::2], page_np[:, :, part])
    np.testing.assert_array_equal(cache.unview(view, pages), pages)


def test_a_device_sees_its_own_heads():
    pages = jax.ShapeDtypeStruct((2, 3, 2 * 8 * 24), jnp.bfloat16)
    for num_devices in (4, 8):  # with 8, two devices have copies of a head
        own = FORMAT.on_each_of(num_devices)
        view = jax.eval_shape(functools.partial(own.view, block_size=8), pages)
        assert view.shape == (2, 6, 1, 8, 24)


@pytest.mark.parametrize(
    ("dtype", "stored", "wanted"),
    [
        ("float32", "float32", None),
        ("bfloat16", "bfloat16", None),
        # What the bits of integers mean.
        ("bfloat16", "uint16", jnp.bfloat16),
        ("float16", "uint16", jnp.float16),
    ],
)
def test_ops_get_the_dtype_that_integers_hold(dtype, stored, wanted):
    pages = jax.ShapeDtypeStruct((1, 1, 1), stored)
    assert dataclasses.replace(FORMAT, dtype=dtype).kv_dtype(pages) == wanted
