"""Tests of `paged_attention/decode_schedule.py`: each tile is done once, parts join exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.decode_schedule import (
    END_UNIT,
    FIRST_TILE,
    FIRST_UNIT,
    NEXT_REQUEST,
    NUM_TILES,
    START_REQUEST,
    START_UNIT,
    equal_shares,
    merge_partials,
    num_partials,
    one_share_per_head,
    schedule_requests,
)
from tests.quick_compile import quick_jit

KV_TILE = 4
NUM_REQS = 5
NUM_KV_HEADS = 3
MAX_SHARES = 7
# (first position seen, sequence length) of NUM_REQS requests, many of them empty.
spans = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([0, 0, 1, 4, 5, 33])),
    min_size=NUM_REQS,
    max_size=NUM_REQS,
)


def requests_of(spans):
    first_seen = np.array([first for first, _ in spans], np.int32)
    seq_lens = np.array([first + seen if seen else 0 for first, seen in spans], np.int32)
    schedule = quick_jit(schedule_requests, num_kv_heads=NUM_KV_HEADS, kv_tile=KV_TILE)
    return schedule(first_seen, seq_lens)


def shares_of(requests, num_shares, min_share):
    """The schedule of equal shares; one per request and head if `num_shares` is None."""
    if num_shares is None:
        return quick_jit(one_share_per_head, num_kv_heads=NUM_KV_HEADS)(requests)
    options = {"num_shares": num_shares, "min_share": min_share}
    return quick_jit(equal_shares, num_kv_heads=NUM_KV_HEADS, **options)(requests)


def walk(schedule):
    """The segments of each share, (share, request, head, tiles), walked as the kernel does."""
    requests_np, shares_np = np.asarray(schedule.requests), np.asarray(schedule.shares)
    for share, line in enumerate(shares_np):
        unit, req = line[START_UNIT], line[START_REQUEST]
        while unit < line[END_UNIT]:
            num_tiles = requests_np[req, NUM_TILES]
            head, skipped = divmod(unit - requests_np[req, FIRST_UNIT], num_tiles)
            end = min(unit + num_tiles - skipped, line[END_UNIT])
            start_tile = requests_np[req, FIRST_TILE] + skipped
            yield share, req, head, range(start_tile, start_tile + end - unit)
            unit = end
            if head == NUM_KV_HEADS - 1:
                req = requests_np[req, NEXT_REQUEST]


def tiles_wanted(spans):
    """Every (request, head, tile) with a position that is seen."""
    return sorted(
        (req, head, tile)
        for req, (first, seen) in enumerate(spans)
        for head in range(NUM_KV_HEADS)
        for tile in {position // KV_TILE for position in range(first, first + seen)}
    )


# `sizes` are pairs of `num_shares` and `min_share`. Each pair compiles a program.
@given(
    spans=spans,
    sizes=st.sampled_from([(None, 1), (1, 1), (2, 1), (2, 9), (MAX_SHARES, 2), (MAX_SHARES, 5)]),
)
def test_every_tile_lies_in_one_share(spans, sizes):
    num_shares, min_share = sizes
    requests = requests_of(spans)
    schedule = shares_of(requests, num_shares, min_share)
    done = [(req, head, tile) for _, req, head, tiles in walk(schedule) for tile in tiles]
    assert sorted(done) == tiles_wanted(spans)


@given(spans=spans, num_shares=st.sampled_from([1, 2, MAX_SHARES]))
def test_shares_differ_by_less_than_a_round(spans, num_shares):
    schedule = shares_of(requests_of(spans), num_shares, min_share=1)
    shares_np = np.asarray(schedule.shares)
    sizes_np = shares_np[:, END_UNIT] - shares_np[:, START_UNIT]
    assert sizes_np.max() == -(-len(tiles_wanted(spans)) // num_shares)


def merge_all(requests, out, lse):
    schedule = equal_shares(requests, NUM_KV_HEADS, num_shares=MAX_SHARES, min_share=2)
    return schedule, merge_partials(schedule, out, lse, NUM_KV_HEADS)


@given(spans=spans, seed=st.integers(0, 100))
def test_merged_parts_are_the_softmax_over_all(spans, seed):
    """Each tile is one logit and one value; unwritten parts are NaN."""
    rng = np.random.default_rng(seed)
    requests = requests_of(spans)
    num_tiles = 30
    logits_np = 5 * rng.standard_normal((NUM_REQS, NUM_KV_HEADS, num_tiles, 2))
    values_np = rng.standard_normal((NUM_REQS, NUM_KV_HEADS, num_tiles, 3))

    def attend(req, head, tiles):
        weights_np = np.exp(logits_np[req, head, list(tiles)])  # [tiles, rows]
        out_np = values_np[req, head, list(tiles)].T @ (weights_np / weights_np.sum(0))
        return out_np, np.log(weights_np.sum(0))

    num_slots = num_partials(NUM_REQS, NUM_KV_HEADS, MAX_SHARES)
    out_np = np.full((num_slots, 3, 2), np.nan, np.float32)
    lse_np = np.full((num_slots, 2), np.nan, np.float32)
    schedule, _ = quick_jit(merge_all)(requests, out_np, lse_np)
    for share, req, head, tiles in walk(schedule):
        slot = share + req * NUM_KV_HEADS + head
        assert np.isnan(lse_np[slot]).all(), "two segments share a slot"
        out_np[slot], lse_np[slot] = attend(req, head, tiles)

    _, merged_parts = quick_jit(merge_all)(requests, out_np, lse_np)
    merged, merged_lse = map(np.asarray, merged_parts)
    wanted = tiles_wanted(spans)
    for req, head in {(req, head) for req, head, _ in wanted}:
        tiles = [t for r, h, t in wanted if (r, h) == (req, head)]
        out_wanted_np, lse_wanted_np = attend(req, head, tiles)
        row = req * NUM_KV_HEADS + head
        np.testing.assert_allclose(merged[row], out_wanted_np, atol=2e-5)
        np.testing.assert_allclose(merged_lse[row], lse_wanted_np, atol=2e-5)


@pytest.mark.parametrize("num_shares", [1, 100])
def test_an_empty_batch_has_empty_shares(num_shares):
    requests = requests_of([(0, 0)] * NUM_REQS)
    schedule = shares_of(requests, num_shares, min_share=4)
    assert list(walk(schedule)) == []
