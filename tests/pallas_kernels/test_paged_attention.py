"""Tests of `key_limits`: attention over the keys of each rank, merged, is attention to all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention, merge_attention_states
from pallas_kernels.paged_attention.api import paged_attention
from tests import on_device
from tests.quick_compile import quick_jit

# (query tokens, seq_len): decode, a prompt, a chunk after cached tokens, an empty row, a prompt of
# fewer tokens than there are ranks.
REQUESTS = ((1, 37), (21, 21), (9, 40), (0, 0), (2, 2), (1, 1))
NUM_PADDING, BLOCK_SIZE, INTERLEAVE = 3, 8, 2
NUM_HEADS, HEAD_DIM, LATENT_DIM = 4, 16, 12
SCALE = 0.3
START_LOC = np.cumsum([0] + [num_query for num_query, _ in REQUESTS])
NUM_TOKENS = int(START_LOC[-1]) + NUM_PADDING


def draw(num_kv_heads):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((NUM_TOKENS, NUM_HEADS, HEAD_DIM))
    keys, values = (
        [rng.standard_normal((seq_len, num_kv_heads, HEAD_DIM)) for _, seq_len in REQUESTS]
        for _ in range(2)
    )
    return q, keys, values


def dense_attention(q, keys, values, value_dim):
    """float64 attention of one token and head at a time, on contiguous keys."""
    out, lse = (
        np.zeros((NUM_TOKENS, NUM_HEADS, value_dim)),
        np.full((NUM_TOKENS, NUM_HEADS), -np.inf),
    )
    for req_idx, (num_query, seq_len) in enumerate(REQUESTS):
        for query_idx in range(num_query):
            token, end = START_LOC[req_idx] + query_idx, seq_len - num_query + query_idx + 1
            for head in range(NUM_HEADS):
                kv_head = head * keys[req_idx].shape[1] // NUM_HEADS
                k, v = keys[req_idx][:end, kv_head], values[req_idx][:end, kv_head]
                weights = np.exp(SCALE * k @ q[token, head])
                out[token, head] = weights @ v[:, :value_dim] / weights.sum()
                lse[token, head] = np.log(weights.sum())
    return out, lse


def of_rank(rank, num_ranks, keys, values, num_kv_heads):
    """The rank's pages (of row 1; all else is NaN), and its sequences and limits."""
    blocks, tables, seq_lens = [np.full((2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), np.nan)], [], []
    limits = np.full(NUM_TOKENS, 99)
    for req_idx, (num_query, seq_len) in enumerate(REQUESTS):
        own = [p for p in range(seq_len) if p // INTERLEAVE % num_ranks == rank]
        for query_idx in range(num_query):
            position = seq_len - num_query + query_idx
            limits[START_LOC[req_idx] + query_idx] = sum(p <= position for p in own)
        table = []
        for start in range(0, len(own), BLOCK_SIZE):
            block = np.full_like(blocks[0], np.nan)
            for offset, position in enumerate(own[start : start + BLOCK_SIZE]):
                block[0, :, offset] = keys[req_idx][position]
                block[1, :, offset] = values[req_idx][position]
            table.append(len(blocks))
            blocks.append(block)
        tables.append(table + [-7] * (6 - len(table)))
        seq_lens.append(len(own))
    return np.stack(blocks), *(np.array(x, np.int32) for x in (tables, seq_lens, limits))


def merged(attend, num_ranks, keys, values, num_kv_heads):
    """`attend` called with what each rank has, and the results merged."""
    parts = []
    for rank in range(num_ranks):
        pages, tables, seq_lens, limits = of_rank(rank, num_ranks, keys, values, num_kv_heads)
        room = 32 - len(pages)  # one shape for all ranks
        pages = np.pad(pages, ((0, room), *[(0, 0)] * 4), constant_values=np.nan)
        pages = np.stack([np.full_like(pages, np.nan), pages]).astype(np.float32)
        parts.append(attend(pages, tables, seq_lens, START_LOC.astype(np.int32), limits))
    merge = quick_jit(merge_attention_states)
    return jax.device_get(functools.reduce(lambda a, b: merge(*a, *b), parts))


BODIES = [
    {"implementation": "reference"},
    {"implementation": "xla"},
    {"batch_invariant": True},
]


@pytest.mark.parametrize("options", BODIES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_merged_attention_of_ranks_is_attention_to_all_keys(num_ranks, options):
    q, keys, values = draw(num_kv_heads=2)
    call = quick_jit(paged_attention, scale=SCALE, return_lse=True, **options)

    def attend(pages, tables, seq_lens, start_loc, limits):
        kv_cache = pages.reshape(2, 64, *pages.shape[3:])
        arrays = (q.astype(np.float32), kv_cache, np.int32(1), tables, seq_lens, start_loc)
        return call(*arrays, key_limits=limits)

    got = merged(attend, num_ranks, keys, values, 2)
    for result, wanted in zip(got, dense_attention(q, keys, values, HEAD_DIM), strict=True):
        np.testing.assert_allclose(result, wanted, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("options", BODIES, ids=str)
def test_merged_latent_attention_of_ranks_is_attention_to_all_latents(options):
    q, keys, _ = draw(num_kv_heads=1)
    call = quick_jit(latent_attention, scale=SCALE, return_lse=True, **options)
    parts = (q[..., :LATENT_DIM].astype(np.float32), q[..., LATENT_DIM:].astype(np.float32))

    def attend(pages, tables, seq_lens, start_loc, limits):
        arrays = (*parts, pages[:, :, 0], np.int32(1), tables, seq_lens, start_loc)
        return call(*arrays, key_limits=limits)

    got = merged(attend, 2, keys, keys, 1)
    for result, wanted in zip(got, dense_attention(q, keys, keys, LATENT_DIM), strict=True):
        np.testing.assert_allclose(result, wanted, atol=5e-6, rtol=5e-6)


def test_a_body_without_limits_is_not_chosen():
    q, keys, values = draw(num_kv_heads=2)
    pages, *sequences, limits = of_rank(0, 2, keys, values, 2)
    arrays = (on_device.array(q), on_device.array(pages.reshape(1, -1, *pages.shape[2:])), 0)
    call = functools.partial(
        paged_attention,
        *arrays,
        *map(jnp.asarray, sequences),
        on_device.array(START_LOC, jnp.int32),
    )
    with pytest.raises(ValueError, match="no such implementation: got 'mosaic_gpu'"):
        call(scale=1.0, key_limits=on_device.array(limits), implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="key_limits need causal attention .* sliding_window=4"):
        call(scale=1.0, key_limits=on_device.array(limits), sliding_window=4)


@pytest.mark.parametrize("options", BODIES, ids=str)
def test_a_token_with_limit_0_sees_no_key(options):
    q, keys, values = draw(num_kv_heads=2)
    pages, tables, seq_lens, limits = of_rank(0, 2, keys, values, 2)
    limits[0] = 0  # a decode
    limits[1:10] = 0  # the first tokens of a prompt
    call = quick_jit(paged_attention, scale=SCALE, return_lse=True, **options)
    pages = np.pad(pages, ((0, 32 - len(pages)), *[(0, 0)] * 4), constant_values=np.nan)
    kv_cache = np.stack([pages, pages]).astype(np.float32).reshape(2, 64, *pages.shape[2:])
    arrays = (q.astype(np.float32), kv_cache, np.int32(1), tables, seq_lens)
    out, lse = call(*arrays, START_LOC.astype(np.int32), key_limits=limits)
    np.testing.assert_array_equal(out[:10], 0)
    np.testing.assert_array_equal(lse[:10], -np.inf)
    assert np.all(np.isfinite(lse[10:22]))
