"""Tests of `paged_attention/xla_shared_prefix.py`: which blocks are shared, and the same answer."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import xla_decode
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.paged_attention.xla_shared_prefix import MIN_ROWS, find_shared_prefix
from tests import on_device
from tests.quick_compile import marked_sizes, quick_jit

GARBAGE = -7


def found(block_tables, num_full):
    """Number of shared blocks, their ids, and the members."""
    prefix = quick_jit(find_shared_prefix)(
        np.asarray(block_tables, np.int32), np.asarray(num_full, np.int32)
    )
    num_blocks = int(prefix.num_blocks)
    members = np.flatnonzero(prefix.is_member).tolist()
    return num_blocks, np.asarray(prefix.block_ids)[:num_blocks].tolist(), members


def test_blocks_are_shared_by_the_requests_that_hold_them():
    tables = [[7, 3, 4], [5, 6, GARBAGE], [7, 3, 8], [7, 3, 9]]
    assert found(tables, [3, 2, 3, 2]) == (2, [7, 3], [0, 2, 3])


def test_a_block_that_is_not_seen_whole_is_not_shared():
    tables = [[7, 3, 4]] * 4
    assert found(tables, [3, 3, 3, 1]) == (3, [7, 3, 4], [0, 1, 2])
    assert found(tables, [1, 1, 3, 1]) == (1, [7], [0, 1, 2, 3])
    assert found(tables, [0, 0, 0, 0]) == (0, [], [])


def test_too_few_holders_share_nothing():
    others = [[10 + idx, GARBAGE, GARBAGE] for idx in range(9)]
    assert found([[7, 3, 4]] * 3 + others, [3] * 3 + [1] * 9) == (3, [7, 3, 4], [0, 1, 2])
    assert found([[7, 3, 4]] * 3 + others[:8] + [[9, 9, 9]] * 2, [3] * 3 + [1] * 10)[0] == 0
    assert found([[7, 3, 4]], [3])[0] == 0


def test_of_two_prefixes_the_one_that_more_requests_hold_is_shared():
    assert found([[1, 2]] * 2 + [[3, 4]] * 3, [2] * 5) == (2, [3, 4], [2, 3, 4])


@settings(max_examples=40)
@given(
    tables=st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=8, max_size=8),
    num_full=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_every_member_holds_all_shared_blocks(tables, num_full):
    num_blocks, block_ids, members = found(tables, num_full)
    assert (num_blocks > 0) == bool(members)
    if not members:
        return
    assert len(members) >= 2
    for req_idx in range(8):
        holds = num_full[req_idx] >= num_blocks and list(tables[req_idx][:num_blocks]) == block_ids
        assert holds == (req_idx in members)


SHARED_CASE = PagedAttentionCase(
    name="shared_prefix",
    requests=((1, 131), (1, 70), (1, 100), (0, 0), (1, 5), (1, 64), (1, 65), (1, 90), (1, 200)),
    max_blocks_per_req=14,
    dtype="float32",
)
RULES = {
    "plain": {},
    "one_kv_head_sinks_and_soft_cap": {
        **{"num_kv_heads": 1, "has_sinks": True, "soft_cap": 2.0},
    },
    "window": {"sliding_window": 20},
}
# These requests share this many first blocks with request 0; request 5 has no other block.
SHARERS = {1: 4, 2: 4, 5: 4, 6: 4, 8: 4}


def shared_inputs(rules):
    """Inputs of `SHARED_CASE` in which requests hold blocks of request 0."""
    inputs = build_inputs(dataclasses.replace(SHARED_CASE, **rules))
    tables = np.array(inputs.block_tables)
    if "sliding_window" not in rules:  # there the left blocks are not written
        for req_idx, num_blocks in SHARERS.items():
            tables[req_idx, :num_blocks] = tables[0, :num_blocks]
    return dataclasses.replace(inputs, block_tables=on_device.array(tables))


@pytest.mark.parametrize("name", RULES)
def test_equals_reference_where_blocks_are_shared(name, attend):
    inputs = shared_inputs(RULES[name])
    assert inputs.rules["max_query_len"] == 1 and len(SHARED_CASE.requests) >= MIN_ROWS
    got = attend(inputs, paged_attention_xla)
    for got_array, wanted in zip(got, attend(inputs, paged_attention_reference), strict=True):
        np.testing.assert_allclose(got_array, wanted, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("num_shared", marked_sizes([4, 5, 8], slow=[1]))
def test_equals_reference_where_shared_blocks_are_several_products(num_shared, attend):
    # One product is of 4 blocks.
    case = dataclasses.replace(
        SHARED_CASE, requests=((1, 570),) * MIN_ROWS, block_size=64, max_blocks_per_req=9
    )
    inputs = build_inputs(case)
    tables = np.array(inputs.block_tables)
    tables[:, :num_shared] = tables[0, :num_shared]
    inputs = dataclasses.replace(inputs, block_tables=on_device.array(tables))
    got = attend(inputs, paged_attention_xla)
    for got_array, wanted in zip(got, attend(inputs, paged_attention_reference), strict=True):
        np.testing.assert_allclose(got_array, wanted, atol=5e-6, rtol=5e-6)


def test_shared_blocks_are_left_out_of_the_list_of_each_request(monkeypatch):
    lists = []
    list_blocks = xla_decode.list_blocks

    def record(block_tables, first_needed, num_needed, num_blocks):
        lists.append((first_needed, num_needed))
        return list_blocks(block_tables, first_needed, num_needed, num_blocks)

    def lists_made(traced_options, *arrays):
        paged_attention_xla(*arrays, **inputs.rules, **traced_options)
        return lists

    monkeypatch.setattr(xla_decode, "list_blocks", record)
    inputs = shared_inputs({})
    lists = jax.jit(lists_made)(inputs.traced_options, *inputs.arrays)
    (first_needed, num_needed), *more = lists
    assert not more
    assert first_needed.tolist() == [4, 4, 4, 0, 0, 4, 4, 0, 4]
    assert num_needed.tolist() == [5, 1, 3, 0, 1, 0, 1, 6, 9]


@pytest.mark.parametrize("seed", range(8))
def test_equals_reference_however_blocks_are_shared(seed, attend):
    """Some share with one request, some with another; rows hold anything after their blocks."""
    rng = np.random.default_rng(seed)
    inputs = build_inputs(SHARED_CASE)
    tables = np.array(inputs.block_tables)
    seq_lens = [seq_len for _, seq_len in SHARED_CASE.requests]
    for req_idx, seq_len in enumerate(seq_lens):
        source = int(rng.choice([0, 0, 8]))
        num_shareable = min(seq_len, seq_lens[source]) // SHARED_CASE.block_size
        first, end = sorted(rng.integers(0, num_shareable + 1, 2))
        first, end = (0, num_shareable) if rng.random() < 0.5 else (first, end)
        tables[req_idx, first:end] = tables[source, first:end]
    for req_idx, seq_len in enumerate(seq_lens):
        num_held = -(-seq_len // SHARED_CASE.block_size)
        others = rng.choice([GARBAGE, 0, 10**6])
        is_like_first = req_idx > 0 and rng.random() < 0.5
        tables[req_idx, num_held:] = tables[0, num_held:] if is_like_first else others
    inputs = dataclasses.replace(inputs, block_tables=on_device.array(tables))
    got = attend(inputs, paged_attention_xla)
    for got_array, wanted in zip(got, attend(inputs, paged_attention_reference), strict=True):
        np.testing.assert_allclose(got_array, wanted, atol=5e-6, rtol=5e-6)
