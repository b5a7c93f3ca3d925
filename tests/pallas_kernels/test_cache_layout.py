"""Tests of `cache_layout.py`."""

import pytest

from pallas_kernels.cache_layout import pad_slot


def test_pad_slot_is_past_the_end_of_every_row():
    assert pad_slot(num_rows=3, num_blocks=10, block_size=16) == 480


def test_pad_slot_plus_any_row_offset_fits_int32():
    assert pad_slot(num_rows=1, num_blocks=2**29 - 1, block_size=2) == 2**30 - 2
    with pytest.raises(ValueError, match="got 1073741824 .* wanted at most 1073741823"):
        pad_slot(num_rows=2, num_blocks=2**25, block_size=16)
