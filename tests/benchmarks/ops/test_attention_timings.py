"""Bytes and operations of attention are those counted by hand."""

import itertools

import pytest

from benchmarks.ops.attention_timings import seen_keys, seen_pairs, work_of
from pallas_kernels.paged_attention.cases import PagedAttentionCase


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_pairs_and_keys_match_the_mask(window: int | None) -> None:
    for num_query, seq_len in itertools.product((1, 3, 7), (7, 12)):
        seen = [
            [key for key in range(position + 1) if window is None or key > position - window]
            for position in range(seq_len - num_query, seq_len)
        ]
        assert seen_pairs(num_query, seq_len, window) == sum(map(len, seen))
        assert seen_keys(num_query, seq_len, window) == len(set().union(*seen))


def test_work_counts_keys_values_queries_and_outputs_once() -> None:
    # Keys and values of 16 tokens, 2 heads of 8; 2 query tokens of 4 heads and their outputs.
    sizes = {"name": "x", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    decodes = PagedAttentionCase(requests=((1, 10), (1, 6)), **sizes)
    assert work_of(decodes).num_bytes == 2 * (2 * 16 * 2 * 8 + 2 * 2 * 4 * 8)
    # 1 + 2 + 3 + 4 pairs, 2 products of 8 multiply-adds, 4 heads.
    assert work_of(PagedAttentionCase(requests=((4, 4),), **sizes)).num_flops == 10 * 2 * 2 * 8 * 4
