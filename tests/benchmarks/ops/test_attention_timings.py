"""Bytes and operations of attention are those counted by hand."""

import itertools

import pytest

from benchmarks.ops.attention_timings import AttentionSizes, seen_keys, seen_pairs


@pytest.mark.parametrize(("num_query", "seq_len"), list(itertools.product((1, 3, 7), (7, 12))))
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_pairs_and_keys_are_those_of_the_mask(num_query: int, seq_len: int, window) -> None:
    seen = [
        [key for key in range(position + 1) if window is None or key > position - window]
        for position in range(seq_len - num_query, seq_len)
    ]
    assert seen_pairs(num_query, seq_len, window) == sum(map(len, seen))
    assert seen_keys(num_query, seq_len, window) == len(set().union(*seen))


def test_work_counts_keys_values_queries_and_outputs_once() -> None:
    # Keys and values of 16 tokens, 2 heads of 8; 2 query tokens of 4 heads and their outputs.
    sizes = AttentionSizes(
        case="x", requests=((1, 10), (1, 6)), num_q_heads=4, num_kv_heads=2, head_dim=8
    )
    assert sizes.work.num_bytes == 2 * (2 * 16 * 2 * 8 + 2 * 2 * 4 * 8)
    # 1 + 2 + 3 + 4 pairs, 2 products of 8 multiply-adds, 4 heads.
    prompt = AttentionSizes(case="x", requests=((4, 4),), num_q_heads=4, num_kv_heads=2, head_dim=8)
    assert prompt.work.num_flops == 10 * 2 * 2 * 8 * 4
