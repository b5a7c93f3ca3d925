"""Tests of `paged_attention/mosaic_tpu_plan.py`: the list of passes, and the sizes of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.mosaic_tpu_plan import (
    HBM_ROW_TILE,
    KV_TILES_BYTES,
    LANES,
    ROW_TILE,
    PassField,
    make_passes,
    make_plan,
    max_passes,
)
from tests.quick_compile import quick_jit

NO_LIMITS = {"is_causal": True, "sliding_window": None, "chunk_size": None}


def passes_as_dicts(seq_lens, query_start_loc, num_tokens, tile_tokens, **limits):
    make = quick_jit(
        make_passes, num_tokens=num_tokens, tile_tokens=tile_tokens, **{**NO_LIMITS, **limits}
    )
    passes, num_passes = make(np.array(seq_lens, np.int32), np.array(query_start_loc, np.int32))
    columns = np.asarray(passes).T
    assert columns.shape[0] == max_passes(num_tokens, len(seq_lens), tile_tokens)
    return [dict(zip(PassField, column, strict=True)) for column in columns], int(num_passes[0])


def test_a_request_that_crosses_a_tile_has_a_pass_in_each():
    passes, num_passes = passes_as_dicts([9, 6, 20], [0, 1, 7, 8], 8, tile_tokens=4)
    assert num_passes == 4
    assert [
        (p[PassField.TILE], p[PassField.REQ], p[PassField.FIRST_TOKEN], p[PassField.NUM_TOKENS])
        for p in passes[:4]
    ] == [(0, 0, 0, 1), (0, 1, 1, 3), (1, 1, 0, 3), (1, 2, 3, 1)]
    assert [p[PassField.FIRST_POSITION] for p in passes[:4]] == [8, 0, 3, 19]
    assert [p[PassField.FIRST_KEY] for p in passes[:4]] == [0, 0, 0, 0]
    assert [p[PassField.END_KEY] for p in passes[:4]] == [9, 3, 6, 20]


@pytest.mark.parametrize(
    ("limits", "first_keys", "end_keys"),
    [
        ({"sliding_window": 5}, [4, 0, 15], [9, 6, 20]),
        ({"chunk_size": 4}, [8, 0, 16], [9, 6, 20]),
        ({"is_causal": False}, [0, 0, 0], [9, 6, 20]),
    ],
)
def test_keys_of_a_pass_are_the_keys_its_tokens_see(limits, first_keys, end_keys):
    passes, num_passes = passes_as_dicts([9, 6, 20], [0, 1, 7, 8], 8, tile_tokens=8, **limits)
    assert num_passes == 3
    assert [p[PassField.FIRST_KEY] for p in passes[:3]] == first_keys
    assert [p[PassField.END_KEY] for p in passes[:3]] == end_keys


@given(
    nums_query=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    tile_tokens=st.sampled_from([4, 16]),
)
def test_passes_visit_every_token_once_in_order_and_padding_never(nums_query, tile_tokens):
    num_tokens = 6 * 20 + 3
    starts = np.concatenate([[0], np.cumsum(nums_query)])
    passes, num_passes = passes_as_dicts(nums_query, starts, num_tokens, tile_tokens)
    visited = [
        (p[PassField.TILE] * tile_tokens + p[PassField.FIRST_TOKEN] + i, p[PassField.REQ])
        for p in passes[:num_passes]
        for i in range(p[PassField.NUM_TOKENS])
    ]
    reqs = np.repeat(np.arange(6), nums_query)
    assert visited == list(enumerate(reqs))
    # Passes that do not exist stay on the last tile, so that nothing is fetched for them.
    last_tile = passes[max(num_passes - 1, 0)][PassField.TILE]
    assert {p[PassField.TILE] for p in passes[num_passes:]} <= {last_tile}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 40])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("block_size", [8, 16, 48, 256])
@pytest.mark.parametrize("num_tokens", [1, 40, 4096])
def test_tiles_are_whole_and_a_window_holds_any_token(
    num_kv_heads, group_size, block_size, num_tokens
):
    q = jax.ShapeDtypeStruct((num_tokens, num_kv_heads * group_size, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1, 16, num_kv_heads, block_size, 128), jnp.bfloat16)
    plan = make_plan(q, cache)
    assert plan.tile_rows % ROW_TILE == 0
    assert plan.window_rows % ROW_TILE == 0
    assert plan.kv_tile_tokens % LANES == 0
    assert block_size % HBM_ROW_TILE == 0
    for token in range(plan.tile_tokens):
        row = token * group_size
        start = min(row // ROW_TILE * ROW_TILE, plan.tile_rows - plan.window_rows)
        assert start % ROW_TILE == 0
        assert start <= row
        assert row + group_size <= start + plan.window_rows


def test_kv_tiles_become_shorter_where_a_block_has_many_heads():
    def kv_tile_bytes(num_kv_heads):
        q = jax.ShapeDtypeStruct((64, num_kv_heads, 256), jnp.float32)
        cache = jax.ShapeDtypeStruct((1, 16, num_kv_heads, 16, 256), jnp.float32)
        plan = make_plan(q, cache)
        return plan.kv_tile_tokens, 4 * plan.kv_tile_tokens * num_kv_heads * 256 * 4

    assert kv_tile_bytes(1)[0] > kv_tile_bytes(16)[0]
    assert kv_tile_bytes(16)[1] <= KV_TILES_BYTES
