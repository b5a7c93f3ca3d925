"""Tests of `paged_attention/ragged_tiles.py`: the plan against lists worked out token by token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.ragged_tiles import (
    SMEM_BYTES,
    PlanField,
    RaggedConfig,
    SeenKeys,
    default_ragged_config,
    max_num_tiles,
    plan_tiles,
)
from tests.quick_compile import quick_jit

CAUSAL = SeenKeys(is_causal=True, sliding_window=None, chunk_size=None)
MAX_REQUESTS, MAX_QUERY_TOKENS = 5, 40  # of the random batches
SMALL = RaggedConfig(heads_per_tile=8, kv_tile=64, num_stages=2)  # 16 tokens per tile


def plan_with_limits(query_start_loc, seq_lens, limits, *, is_causal, **static):
    """`plan_tiles`, with the window or chunk as an array, so that one program serves all sizes."""
    no_limits = {"sliding_window": None, "chunk_size": None}
    seen = SeenKeys(is_causal=is_causal, **(no_limits | limits))
    return plan_tiles(query_start_loc, seq_lens, seen=seen, **static)


def plan_of(requests, *, seen=CAUSAL, config=SMALL, skip_single=False, num_padding=0):
    """The plan of requests (query tokens, seq_len), as dicts, and the row of each token."""
    num_query = [num for num, _ in requests]
    limits = {name: getattr(seen, name) for name in ("sliding_window", "chunk_size")}
    limits = {name: np.int32(limit) for name, limit in limits.items() if limit is not None}
    plan, token_rows = quick_jit(
        plan_with_limits,
        num_tokens=max(1, sum(num_query) + num_padding),
        config=config,
        is_causal=seen.is_causal,
        skip_single=skip_single,
    )(
        np.concatenate([[0], np.cumsum(num_query)]).astype(np.int32),
        np.array([seq_len for _, seq_len in requests], np.int32),
        limits,
    )
    tiles = [{field: int(row[field]) for field in PlanField} for row in np.asarray(plan)]
    return tiles, np.asarray(token_rows)


def test_a_batch_worked_out_by_hand():
    # 20 tokens at positions 80 to 99 in tiles of 16; one token at position 0; 40 rows of padding.
    tiles, token_rows = plan_of(((20, 100), (0, 0), (1, 1)), num_padding=40)
    names = [
        PlanField.TILE_IDX,
        PlanField.REQ_IDX,
        PlanField.FIRST_TOKEN,
        PlanField.NUM_TOKENS,
        PlanField.FIRST_POSITION,
        PlanField.FULL_END,
        PlanField.KV_END,
    ]
    active = [tile for tile in tiles if tile[PlanField.NUM_TOKENS]]
    assert [[tile[name] for name in names] for tile in active] == [
        [0, 0, 0, 16, 80, 1, 2],  # keys 0 to 95: one tile of 64 is seen by all, the next in part
        [1, 0, 16, 4, 96, 1, 2],
        [2, 2, 20, 1, 0, 0, 1],
    ]
    assert token_rows[:21].tolist() == [*range(20), 32]


def is_seen(seen, positions, seq_len, num_keys):
    """Which keys each token reads by the contract: bool[len(positions), num_keys]."""
    tokens_np, keys_np = np.array(positions)[:, None], np.arange(num_keys)
    read_np = np.broadcast_to(keys_np < seq_len, (len(positions), num_keys)).copy()
    if not seen.is_causal:
        return read_np
    read_np &= keys_np <= tokens_np
    if seen.sliding_window is not None:
        read_np &= keys_np > tokens_np - seen.sliding_window
    if seen.chunk_size is not None:
        read_np &= keys_np // seen.chunk_size == tokens_np // seen.chunk_size
    return read_np


def check_plan(requests, seen, config, skip_single, num_padding=0):
    """Every token is in one tile, and every tile reads what its tokens see."""
    tiles, token_rows = plan_of(
        requests, seen=seen, config=config, skip_single=skip_single, num_padding=num_padding
    )
    rows_of_tokens = {}
    num_kv_tiles = []
    for tile in tiles:
        num_query, seq_len = requests[tile[PlanField.REQ_IDX]]
        num_kv_tiles.append(tile[PlanField.KV_END] - tile[PlanField.KV_START])
        for idx in range(tile[PlanField.NUM_TOKENS]):
            token = tile[PlanField.FIRST_TOKEN] + idx
            assert token not in rows_of_tokens
            rows_of_tokens[token] = tile[PlanField.TILE_IDX] * config.tokens_per_tile + idx
        if not tile[PlanField.NUM_TOKENS]:
            assert num_kv_tiles[-1] == 0
            continue
        assert tile[PlanField.SEQ_LEN] == seq_len
        positions = [tile[PlanField.FIRST_POSITION] + i for i in range(tile[PlanField.NUM_TOKENS])]
        num_keys = (-(-seq_len // config.kv_tile) + 1) * config.kv_tile
        seen_np = is_seen(seen, positions, seq_len, num_keys)
        # The index of the first key that any token reads; 0 if there is none.
        assert tile[PlanField.SEEN_START] == seen_np.any(axis=0).argmax()
        for kv_tile in range(num_keys // config.kv_tile):
            own_np = seen_np[:, kv_tile * config.kv_tile : (kv_tile + 1) * config.kv_tile]
            is_read = tile[PlanField.KV_START] <= kv_tile < tile[PlanField.KV_END]
            is_full = tile[PlanField.FULL_START] <= kv_tile < tile[PlanField.FULL_END]
            assert is_read == own_np.any()
            assert is_full == own_np.all()
    assert num_kv_tiles == sorted(num_kv_tiles, reverse=True)

    wanted = set()
    first_token = 0
    for num_query, _ in requests:
        if num_query != 1 or not skip_single:
            wanted |= set(range(first_token, first_token + num_query))
        first_token += num_query
    assert set(rows_of_tokens) == wanted
    assert {token: token_rows[token] for token in wanted} == rows_of_tokens


REQUESTS = st.lists(
    st.integers(0, MAX_QUERY_TOKENS).flatmap(
        lambda num_query: st.tuples(st.just(num_query), st.integers(num_query, 300))
    ),
    min_size=1,
    max_size=MAX_REQUESTS,
)
SEEN = st.one_of(
    st.just(CAUSAL),
    st.just(dataclasses.replace(CAUSAL, is_causal=False)),
    st.integers(1, 150).map(lambda w: dataclasses.replace(CAUSAL, sliding_window=w)),
    st.integers(1, 150).map(lambda c: dataclasses.replace(CAUSAL, chunk_size=c)),
)


@settings(max_examples=100)  # edges of tiles are rare
@given(
    requests=REQUESTS,
    seen=SEEN,
    sizes=st.sampled_from([(4, 128, True), (8, 64, False)]),
)
def test_tiles_cover_every_token_once_and_read_what_it_sees(requests, seen, sizes):
    heads_per_tile, kv_tile, skip_single = sizes
    config = RaggedConfig(heads_per_tile=heads_per_tile, kv_tile=kv_tile, num_stages=2)
    # All examples have the same shapes, because operations are compiled for each new shape.
    requests = [*requests, *[(0, 0)] * (MAX_REQUESTS - len(requests))]
    num_padding = MAX_REQUESTS * MAX_QUERY_TOKENS + 5 - sum(num for num, _ in requests)
    check_plan(requests, seen, config, skip_single, num_padding)


@pytest.mark.parametrize(
    ("requests", "skip_single", "num_tiles"),
    [
        (((17, 17), (1, 1)), False, 3),
        (((9, 9), (1, 1)), False, 2),
        (((40, 300),), False, 3),
        (((18, 18),), True, 2),
        (((0, 0),), False, 1),
    ],
)
def test_a_plan_without_a_tile_to_spare_holds_every_token(requests, skip_single, num_tiles):
    num_tokens = max(1, sum(num for num, _ in requests))
    assert max_num_tiles(num_tokens, len(requests), 16, skip_single) == num_tiles
    check_plan(requests, CAUSAL, SMALL, skip_single)


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "skip_single", "wanted"),
    [
        (10, 2, False, 2),  # 9 and 1: 1 + 1 tiles of 16
        (18, 2, False, 3),  # 17 and 1
        (18, 2, True, 3),  # 16 and 2 need 2 tiles; the bound is not that exact
        (3, 64, False, 3),  # at most 3 requests have a token
        (3, 64, True, 1),  # and at most 1 has two
        (8192, 1, False, 512),
    ],
)
def test_there_are_no_more_tiles_than_a_batch_can_need(num_tokens, num_reqs, skip_single, wanted):
    assert max_num_tiles(num_tokens, num_reqs, 16, skip_single) == wanted


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8, 12, 16, 71])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
def test_default_config_fits_shared_memory_and_the_group(head_dim, group_size):
    config = default_ragged_config(head_dim=head_dim, group_size=group_size, itemsize=2)
    assert group_size % config.heads_per_tile == 0
    assert config.smem_bytes(head_dim, 2) < SMEM_BYTES
    one_more = dataclasses.replace(config, num_stages=config.num_stages + 1)
    assert config.num_stages == 4 or one_more.smem_bytes(head_dim, 2) > SMEM_BYTES - 4096


def test_default_config_of_a_llama():
    config = default_ragged_config(head_dim=128, group_size=4, itemsize=2)
    assert config == RaggedConfig(heads_per_tile=4, kv_tile=128, num_stages=3)
    # Q 128 x 128, K and V 3 x 128 x 128 each, 2 bytes an element.
    assert config.smem_bytes(128, 2) == 32_768 + 2 * 3 * 32_768
    assert (config.tokens_per_warpgroup, config.tokens_per_tile) == (16, 32)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads_per_tile": 3},
        {"heads_per_tile": 16},
        {"kv_tile": 96},
        {"kv_tile": 16},
        {"num_stages": 1},
    ],
)
def test_a_config_that_the_kernel_cannot_use_raises(sizes):
    with pytest.raises(ValueError, match="got"):
        dataclasses.replace(SMALL, **sizes)
