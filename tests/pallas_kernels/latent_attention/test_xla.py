"""Tests of `latent_attention/xla.py`: results, equal bits in every batch, and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import block_copy, kv_scatter, latent_attention
from pallas_kernels.latent_attention.cases import CASES, LatentAttentionCase, build_inputs
from pallas_kernels.latent_attention.xla import (
    latent_attention_batch_invariant,
    latent_attention_xla,
)
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.latent_attention.dense_attention import dense_attention
from tests.quick_compile import slow_unless_named

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}
# `test_equals_dense_attention_on_any_batch` has mixed batches and requests without tokens. Other
# cases run with `pytest -m slow`.
QUICK_CASES = (
    "padding_only",
    "many_chunks",
    "chunks_over_long_contexts",
    "mixed_bfloat16_as_uint16",
)


def check_equals_dense_attention(case, body, attend):
    inputs = build_inputs(case)
    pair = attend(inputs, body)
    for got, wanted in zip(pair, dense_attention(inputs), strict=True):
        tolerance = TOLERANCES[case.dtype]
        np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_dense_attention(case, attend):
    check_equals_dense_attention(case, latent_attention_xla, attend)


@pytest.mark.parametrize(
    "case",
    slow_unless_named(CASES, "mixed_bfloat16_as_uint16", "empty_and_idle_requests"),
)
def test_batch_invariant_body_equals_dense_attention(case, attend):
    check_equals_dense_attention(case, latent_attention_batch_invariant, attend)


def test_float32_queries_lose_nothing_to_a_narrower_cache(attend):
    inputs = build_inputs(LatentAttentionCase(name="", requests=((1, 40), (5, 9))))
    narrower = np.asarray(inputs.kv_cache).astype(jnp.bfloat16)
    cached_np = tuple(x.astype(jnp.bfloat16).astype(np.float32) for x in inputs.cached_np)
    inputs = dataclasses.replace(inputs, kv_cache=narrower, cached_np=cached_np)
    pairs = (attend(inputs, latent_attention_xla), dense_attention(inputs))
    for got, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=5e-6)


# One padded shape for all drawn batches, so that the body compiles once.
MAX_TOKENS, MAX_REQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE = 60, 5, 8, 48, 8


@st.composite
def ragged_requests(draw):
    """Draws (query tokens, seq_len) of MAX_REQS requests that fit MAX_TOKENS."""
    requests, room = [], MAX_TOKENS
    for _ in range(MAX_REQS):
        seq_len = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE))
        num_query = draw(st.sampled_from([0, 1, seq_len, seq_len // 2]))
        num_query = min(num_query, seq_len, room)
        room -= num_query
        requests.append((num_query, seq_len))
    return tuple(requests)


@given(requests=ragged_requests(), seed=st.integers(0, 1000))
def test_equals_dense_attention_on_any_batch(run_jitted, requests, seed):
    num_query = sum(num_query for num_query, _ in requests)
    case = LatentAttentionCase(
        name="drawn",
        requests=requests,
        num_padding_tokens=MAX_TOKENS - num_query,
        max_blocks_per_req=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        latent_dim=8,
        rope_dim=4,
    )
    inputs = build_inputs(case, seed)
    num_missing = NUM_BLOCKS - inputs.kv_cache.shape[1]
    pad_blocks = ((0, 0), (0, num_missing), (0, 0), (0, 0), (0, 0))
    kv_cache = np.pad(np.asarray(inputs.kv_cache), pad_blocks, constant_values=np.nan)
    arguments = (*inputs.arrays[:2], kv_cache, np.int32(1), *inputs.arrays[4:])
    rules = inputs.rules | {"max_query_len": None}
    results = run_jitted(latent_attention_xla, *arguments, **rules)
    for got, wanted in zip(results, dense_attention(inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=5e-6)


def test_bits_do_not_depend_on_the_batch_when_it_is_to_be_invariant(run_jitted):
    case = LatentAttentionCase(name="", requests=((9, 150), (1, 40), (20, 20)))
    inputs = build_inputs(case)
    call = functools.partial(run_jitted, latent_attention, scale=0.2, batch_invariant=True)
    row = np.int32(inputs.row)
    together = call(*inputs.arrays[:3], row, *inputs.arrays[4:])

    # The last four tokens of the first request, alone, in a call of the same shapes.
    def moved(x):
        moved_np = np.zeros(x.shape, x.dtype)
        moved_np[:4] = np.asarray(x)[5:9]
        return moved_np

    alone = call(
        *(moved(inputs.q_latent), moved(inputs.q_rope), inputs.kv_cache, row),
        inputs.block_tables,
        np.array([150, 0, 0], np.int32),
        np.array([0, 4, 4, 4], np.int32),
    )
    np.testing.assert_array_equal(alone[:4], together[5:9])


NUM_LAYERS, LATENT_DIM, ROPE_DIM = 2, 32, 16


def step(
    pages,
    q,
    slots,
    block_tables,
    seq_lens,
    query_start_loc,
    *,
    block_size=BLOCK_SIZE,
    kv_dtype=None,
    max_query_len=None,
):
    """Copies a block, then two layers that write to their row of the pages and read it."""
    kv_cache = block_copy(pages, slots[:1], slots[-1:]).reshape(
        *(NUM_LAYERS, -1, 1, block_size, LATENT_DIM + ROPE_DIM)
    )
    for layer_idx in range(NUM_LAYERS):
        # As in a model, what a layer writes depends on what the layer before it read.
        latents = jnp.sin(q[:, :1])
        kv_cache = kv_scatter(kv_cache, latents, None, slots, layer_idx, kv_dtype=kv_dtype)
        out = latent_attention(
            *(q[..., :LATENT_DIM], q[..., LATENT_DIM:], kv_cache, layer_idx),
            *(block_tables, seq_lens, query_start_loc),
            scale=1.0,
            kv_dtype=kv_dtype,
            max_query_len=max_query_len,
        )
        q = q.at[..., :LATENT_DIM].add(out)
    return kv_cache.reshape(pages.shape), q


@pytest.mark.parametrize(
    ("num_tokens", "max_blocks_per_req", "options", "dtype"),
    [
        pytest.param(1, 5, {"max_query_len": 1}, "float32", marks=pytest.mark.slow),
        (4, 5, {"kv_dtype": "float16"}, "uint16"),
        pytest.param(1, 1, {"block_size": 256}, "float32", marks=pytest.mark.slow),
        pytest.param(1, 1, {"kv_dtype": "bfloat16"}, "uint16", marks=pytest.mark.slow),
    ],
)
def test_donated_pages_of_latents_are_updated_in_place(
    num_tokens, max_blocks_per_req, options, dtype
):
    block_size = options.get("block_size", BLOCK_SIZE)
    num_words = block_size * (LATENT_DIM + ROPE_DIM)
    pages = jax.ShapeDtypeStruct((NUM_LAYERS, 2**18 // block_size, num_words), dtype)
    q = jax.ShapeDtypeStruct((num_tokens, 4, LATENT_DIM + ROPE_DIM), jnp.float32)
    int_shapes = ((num_tokens,), (num_tokens, max_blocks_per_req), (num_tokens,), (num_tokens + 1,))
    integers = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in int_shapes)
    program = jax.jit(functools.partial(step, **options), donate_argnums=0)
    memory = program.lower(pages, q, *integers).compile(AS_FOR_USERS).memory_analysis()
    pages_bytes = pages.dtype.itemsize * int(np.prod(pages.shape))
    assert memory.alias_size_in_bytes >= pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes // 50  # a copy of one row would be half


def temporary_bytes(*, num_tokens, max_blocks_per_req, num_heads=16, num_reqs=4):
    """Of a call with DeepSeek's widths and blocks of 64 tokens."""
    heads = (num_tokens, num_heads)
    arrays = [jax.ShapeDtypeStruct((*heads, dim), jnp.float32) for dim in (512, 64)]
    arrays.append(jax.ShapeDtypeStruct((1, 4096, 1, 64, 576), jnp.float32))
    dims = ((), (num_reqs, max_blocks_per_req), (num_reqs,), (num_reqs + 1,))
    arrays += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in dims]
    program = jax.jit(functools.partial(latent_attention, scale=0.1))
    return program.lower(*arrays).compile(AS_FOR_USERS).memory_analysis().temp_size_in_bytes


def test_temporary_memory_is_bounded_by_the_chunk_and_not_by_the_context():
    # Besides the output in float32: tiles (5.9 MiB). The four contexts have up to 2^20 tokens each,
    # so one byte per token would exceed the limit.
    temporary = temporary_bytes(num_tokens=512, max_blocks_per_req=2**14)
    output = 512 * 16 * 512 * 4
    assert output <= temporary < output + 8 * 2**20


def write_and_copy(latents, slots, src, dst, *, implementation):
    kv_cache = jnp.zeros((2, 3, 1, 2, 3))
    kv_cache = kv_scatter(kv_cache, latents, None, slots, 1, implementation=implementation)
    return block_copy(kv_cache, src, dst, implementation=implementation)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_latents_are_written_and_copied(run_jitted, implementation):
    # Two tokens of width 3 go to slots 1 and 2 (block 0, block 1 of size 2); then block 1 -> 2.
    latents = np.array([[[1, 2, 3]], [[4, 5, 6]]], np.float32)
    ids = (np.array(ids, np.int32) for ids in ([1, 2], [1], [2]))
    kv_cache = run_jitted(write_and_copy, latents, *ids, implementation=implementation)
    wanted = np.zeros((2, 3, 2, 3))
    wanted[1] = [[[0, 0, 0], [1, 2, 3]], [[4, 5, 6], [0, 0, 0]], [[4, 5, 6], [0, 0, 0]]]
    np.testing.assert_array_equal(kv_cache[:, :, 0], wanted)
