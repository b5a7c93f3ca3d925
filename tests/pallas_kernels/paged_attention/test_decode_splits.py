"""Tests of `paged_attention/decode_splits.py`: the rule, on shapes that matter and in general."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.decode_splits import (
    LONG_TILES,
    ROUNDS,
    SHORT_TILES,
    choose_num_shares,
)

# An H200 with two programs an SM, and tiles of 64 tokens.
NUM_PROGRAMS = 2 * 132


@pytest.mark.parametrize(
    "num_reqs, max_len, wanted",
    [
        (64, 8_192, NUM_PROGRAMS),
        (8, 32_768, NUM_PROGRAMS),
        (256, 1_024, None),
        (8, 512, None),
        (1, 131_072, NUM_PROGRAMS),
        # One long sequence among 256 would keep its program busy long after all others.
        (256, 131_072, NUM_PROGRAMS),
    ],
)
def test_the_shapes_of_the_table(num_reqs, max_len, wanted):
    chosen = choose_num_shares(
        num_reqs=num_reqs, num_kv_heads=8, max_tiles=max_len // 64, num_programs=NUM_PROGRAMS
    )
    assert chosen == wanted


@given(
    num_reqs=st.integers(1, 2_000),
    num_kv_heads=st.integers(1, 32),
    max_tiles=st.integers(1, 4_096),
    num_programs=st.integers(1, 600),
)
def test_few_programs_are_launched_and_none_lasts_long_alone(
    num_reqs, num_kv_heads, max_tiles, num_programs
):
    chosen = choose_num_shares(
        num_reqs=num_reqs,
        num_kv_heads=num_kv_heads,
        max_tiles=max_tiles,
        num_programs=num_programs,
    )
    if chosen is None:
        assert max_tiles <= LONG_TILES
        assert max_tiles <= SHORT_TILES or num_reqs * num_kv_heads >= ROUNDS * num_programs
    else:
        assert 1 <= chosen <= num_programs
        assert max_tiles > SHORT_TILES


def test_tiny_work_has_no_more_shares_than_tiles():
    assert choose_num_shares(num_reqs=1, num_kv_heads=1, max_tiles=9, num_programs=264) == 9
