"""Tests of `cache_layout.py`."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cache_layout import check_kv_cache, check_pages, pad_slot


def test_pad_slot_is_past_the_end_of_every_row():
    assert pad_slot(num_rows=3, num_blocks=10, block_size=16) == 480


def test_pad_slot_plus_any_row_offset_fits_int32():
    assert pad_slot(num_rows=1, num_blocks=2**29 - 1, block_size=2) == 2**30 - 2
    with pytest.raises(ValueError, match="got 1073741824 .* wanted at most 1073741823"):
        pad_slot(num_rows=2, num_blocks=2**25, block_size=16)


def array(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_a_block_has_as_many_entries_as_parts():
    check_kv_cache("op", array(2, 10, 1, 16, 32), num_parts=2)
    check_kv_cache("op", array(2, 5, 1, 16, 32), num_parts=1)
    with pytest.raises(ValueError, match=r"op: kv_cache .* got \[2, 5, 1, 16, 32\], wanted 2 entr"):
        check_kv_cache("op", array(2, 5, 1, 16, 32), num_parts=2)


@pytest.mark.parametrize("dims", [(2, 0, 1, 16, 32), (2, 4, 1, 16, 0)], ids=str)
def test_an_empty_cache_is_refused(dims):
    with pytest.raises(ValueError, match="op: kv_cache is empty: got .* wanted no axis of"):
        check_kv_cache("op", array(*dims), num_parts=2)


def test_pages_have_rows_blocks_and_words():
    check_pages("op", array(2, 5, 7))
    check_pages("op", array(2, 5, 2, 1, 16, 32))
    with pytest.raises(ValueError, match=r"op: pages .* got \[2, 5\], wanted \[num_rows, num_bl"):
        check_pages("op", array(2, 5))
    with pytest.raises(ValueError, match="op: pages is empty: got .* wanted no axis of"):
        check_pages("op", array(2, 5, 0))
