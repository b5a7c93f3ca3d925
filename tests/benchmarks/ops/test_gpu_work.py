"""Bytes and operations are what one counts by hand."""

import itertools

import pytest

from benchmarks.ops import gpu_work


def test_decode_reads_each_key_and_value_once() -> None:
    # 2 requests of 10 and 6 tokens: 16 keys and 16 values of 2 heads x 8 numbers x 2 bytes; and
    # 2 tokens x 4 heads x 8 numbers x 2 bytes, of q and of the output.
    num_bytes = gpu_work.attention_bytes(
        ((1, 10), (1, 6)), num_q_heads=4, num_kv_heads=2, head_dim=8, itemsize=2
    )
    assert num_bytes == 2 * 16 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2 == 1280


def test_the_wanted_decode_case_is_two_gibibytes() -> None:
    num_bytes = gpu_work.attention_bytes(
        ((1, 8192),) * 64, num_q_heads=32, num_kv_heads=8, head_dim=128, itemsize=2
    )
    assert num_bytes == 2 * 2**30 + 2 * 64 * 32 * 128 * 2


def test_a_common_prefix_is_read_once() -> None:
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 1, "itemsize": 1}
    apart = gpu_work.attention_bytes(((1, 10),) * 3, **sizes)
    shared = gpu_work.attention_bytes(((1, 10),) * 3, **sizes, num_common_tokens=8)
    assert apart - shared == 2 * 2 * 8  # two of three copies, K and V


def test_a_causal_prompt_has_half_the_products() -> None:
    # 1 + 2 + 3 + 4 pairs, 2 products of 8 multiply-adds each, 4 heads.
    flops = gpu_work.attention_flops(((4, 4),), num_q_heads=4, head_dim=8)
    assert flops == 10 * 2 * 2 * 8 * 4 == 1280


@pytest.mark.parametrize("num_query, seq_len", list(itertools.product((1, 3, 7), (7, 12))))
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_pairs_and_keys_are_those_of_the_mask(num_query: int, seq_len: int, window) -> None:
    seen = [
        [key for key in range(position + 1) if window is None or key > position - window]
        for position in range(seq_len - num_query, seq_len)
    ]
    assert gpu_work.seen_pairs(num_query, seq_len, window) == sum(map(len, seen))
    assert gpu_work.seen_keys(num_query, seq_len, window) == len(set().union(*seen))


def test_an_empty_request_does_nothing() -> None:
    assert gpu_work.seen_pairs(0, 0) == gpu_work.seen_keys(0, 0) == 0
    assert gpu_work.seen_keys(0, 12) == gpu_work.seen_keys(0, 12, 4) == 0


def test_latents_are_read_once_for_all_heads() -> None:
    dims = {"num_q_heads": 4, "latent_dim": 8, "rope_dim": 2}
    # 7 tokens of 10 numbers; 2 query tokens of 4 heads x 10; outputs of 4 heads x 8.
    assert gpu_work.mla_bytes((3, 4), **dims, itemsize=2) == 2 * (70 + 80 + 64)
    # A pair: 10 multiply-adds for the logit, 8 for the output.
    assert gpu_work.mla_flops((3, 4), **dims) == 7 * 4 * 2 * 18


def test_copies_count_reads_and_writes() -> None:
    assert gpu_work.copied_bytes(3, 2, 8, 2) == 2 * 2 * 3 * 2 * 8 * 2
    assert gpu_work.merge_bytes(3, 2, 8, 2) == 3 * 3 * 2 * (16 + 4)
    # 2 groups x (5 positions + 5 slots + 3 x 4 table entries) + 4 query starts, 4 bytes each.
    assert gpu_work.slot_mapping_bytes(2, 5, 3, 4) == 4 * (2 * 22 + 4)
