"""Paged allocation wastes at most the last block of a sequence."""

from benchmarks.host.kv_waste import measure


def test_waste_of_long_sequences_is_under_4_percent_at_block_size_16() -> None:
    paged, contiguous = measure(block_size=16, num_requests=24, min_tokens=500, seed=7)
    # Half a block of at least 500 tokens, on average: 8 / 508.
    assert 0 < paged < 4
    assert contiguous > 10 * paged


def test_larger_blocks_waste_more() -> None:
    small, _ = measure(block_size=16, num_requests=24, min_tokens=500, seed=7)
    large, _ = measure(block_size=64, num_requests=24, min_tokens=500, seed=7)
    assert small < large
