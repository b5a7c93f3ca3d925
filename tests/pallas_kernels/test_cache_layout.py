"""Tests of `cache_layout.py`."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cache_layout import check_kv_caches, pad_slot


def test_pad_slot_is_past_the_end_of_every_row():
    assert pad_slot(num_rows=3, num_blocks=10, block_size=16) == 480


def test_pad_slot_plus_any_row_offset_fits_int32():
    assert pad_slot(num_rows=1, num_blocks=2**29 - 1, block_size=2) == 2**30 - 2
    with pytest.raises(ValueError, match="got 1073741824 .* wanted at most 1073741823"):
        pad_slot(num_rows=2, num_blocks=2**25, block_size=16)


def test_only_values_may_have_no_columns():
    k_cache = jax.ShapeDtypeStruct((2, 5, 1, 16, 32), jnp.float32)
    check_kv_caches("op", k_cache, jax.ShapeDtypeStruct((2, 5, 1, 16, 0), jnp.float32))
    for shape in ((2, 0, 1, 16, 32), (2, 5, 1, 16, 0)):
        empty = jax.ShapeDtypeStruct(shape, jnp.float32)
        with pytest.raises(ValueError, match="op: k_cache is empty: got .* wanted no axis of"):
            check_kv_caches("op", empty, empty)
