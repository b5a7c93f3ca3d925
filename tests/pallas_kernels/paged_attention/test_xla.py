"""Tests of `paged_attention/xla.py`: against dense attention, and its promises on memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import kv_scatter, paged_attention
from pallas_kernels.paged_attention.cases import (
    CASES,
    LONG_CASES,
    NARROW_CACHE_CASES,
    UINT16_CASES,
    PagedAttentionCase,
    build_inputs,
)
from pallas_kernels.paged_attention.xla import paged_attention_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.pallas_kernels.paged_attention.dense_attention import dense_attention
from tests.quick_compile import slow_unless_named

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}


# Each way to store the cache once, widths, tiles and the decode loop.
# `test_equals_dense_attention_on_any_ragged_batch` covers the rules. Decodes of a float32 cache are
# in `test_decode_program_equals_the_program_for_any_batch`. The other cases run with
# `pytest -m slow`.
QUICK_CASES = (
    "many_tiles_and_chunks",
    "long_chunk_window",
    "as_many_tokens_as_requests_but_a_prompt",
    "bfloat16_mixed_float16_cache",
    "decode_bfloat16_as_uint16",
    "float32_over_float16_as_uint16",
    "decode_131072",
)


@pytest.mark.parametrize(
    "case",
    slow_unless_named(CASES + LONG_CASES + NARROW_CACHE_CASES + UINT16_CASES, *QUICK_CASES),
)
def test_equals_dense_attention(case, attend):
    inputs = build_inputs(case)
    out, lse = attend(inputs, paged_attention_xla)
    expected_out, expected_lse = dense_attention(inputs)
    tolerance = TOLERANCES[case.dtype]
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=5e-6)


# One padded shape for all drawn batches, so that the body compiles once per rule.
MAX_TOKENS, MAX_REQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE = 96, 5, 8, 48, 8
RULES = (
    {"sliding_window": 11, "soft_cap": 2.0},
    {"chunk_size": 12},
    {"is_causal": False, "num_kv_heads": 1},
)


@st.composite
def ragged_requests(draw):
    """Draws (query tokens, seq_len) of up to MAX_REQS requests that fit MAX_TOKENS."""
    requests, room = [], MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_REQS))):
        seq_len = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE))
        num_query = draw(st.sampled_from([0, 1, min(seq_len, room), min(seq_len // 2, room)]))
        num_query = min(num_query, seq_len, room)
        room -= num_query
        requests.append((num_query, seq_len))
    return tuple(requests) + ((0, 0),) * (MAX_REQS - len(requests))


@given(
    requests=ragged_requests(),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 1000),
)
def test_equals_dense_attention_on_any_ragged_batch(attend, requests, rule, seed):
    num_query = sum(num_query for num_query, _ in requests)
    case = PagedAttentionCase(
        name="drawn",
        requests=requests,
        num_padding_tokens=MAX_TOKENS - num_query,
        max_blocks_per_req=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        head_dim=8,
        has_sinks=True,
        **rule,
    )
    inputs = build_inputs(case, seed)
    # The last block belongs to no request: NaN, of which there can be more.
    pad_blocks = ((0, 0), (0, 2 * NUM_BLOCKS - inputs.kv_cache.shape[1]), (0, 0), (0, 0), (0, 0))
    kv_cache = np.pad(np.asarray(inputs.kv_cache), pad_blocks, mode="edge")
    inputs = dataclasses.replace(
        inputs,
        kv_cache=kv_cache,
        row=np.int32(1),
        rules=inputs.rules | {"max_query_len": None},
    )
    results = attend(inputs, paged_attention_xla)
    for got, wanted in zip(results, dense_attention(inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=5e-6)
    out, lse = results
    assert not out[num_query:].any()
    assert np.isneginf(lse[num_query:]).all()


DECODE_CASES = tuple(case for case in CASES if case.name in ("decode_mha", "padding_only"))


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decode_program_equals_the_program_for_any_batch(case, attend):
    inputs = build_inputs(case)
    assert inputs.rules["max_query_len"] == 1
    got = attend(inputs, paged_attention_xla)
    any_batch = dataclasses.replace(inputs, rules=inputs.rules | {"max_query_len": None})
    for got_array, wanted in zip(got, attend(any_batch, paged_attention_xla), strict=True):
        np.testing.assert_array_equal(got_array, wanted)


def test_decode_program_has_no_loop_for_prompts():
    inputs = build_inputs(next(case for case in CASES if case.name == "decode_mha"))

    def num_loops(max_query_len):
        rules = inputs.rules | inputs.traced_options | {"max_query_len": max_query_len}
        call = functools.partial(paged_attention_xla, **rules)
        return jax.jit(call).lower(*inputs.arrays).as_text().count("stablehlo.while")

    assert num_loops(1) == 1
    assert num_loops(2) == num_loops(None) > 1


NUM_LAYERS, NUM_BLOCKS_OF_POOL, WIDTH = 2, 16_384, 32


def step(pages, q, slots, block_tables, seq_lens, query_start_loc, *, sizes, kv_dtype):
    """Two layers that write to their row of the pages and then read it; `sizes`: heads, block."""
    kv_cache = pages.reshape(NUM_LAYERS, -1, *sizes, WIDTH)
    num_kv_heads = sizes[0]
    for layer_idx in range(NUM_LAYERS):
        # As in a model, what a layer writes depends on what the layer before it read. Otherwise
        # nothing orders this write after that read, and XLA keeps a copy to be safe.
        k, v = jnp.sin(q[:, :num_kv_heads]), jnp.cos(q[:, -num_kv_heads:])
        kv_cache = kv_scatter(kv_cache, k, v, slots, layer_idx, kv_dtype=kv_dtype)
        q = paged_attention(
            *(q, kv_cache, layer_idx, block_tables, seq_lens, query_start_loc),
            scale=1.0,
            kv_dtype=kv_dtype,
        )
    return kv_cache.reshape(pages.shape), q


def burst(pages, q, slots, block_tables, seq_lens, query_start_loc, **options):
    """Several steps in one loop, as many as the first sequence is long."""

    def body(state):
        step_idx, pages, q = state
        pages_and_q = step(*(pages, q, slots, block_tables, seq_lens, query_start_loc), **options)
        return step_idx + 1, *pages_and_q

    return jax.lax.while_loop(lambda state: state[0] < seq_lens[0], body, (0, pages, q))[1:]


# XLA on the CPU copies a cache if a scatter has one index, if the dtype is bfloat16, if the view of
# a block is bad for it, or if the whole array is converted. These are the default options of the
# compiler: the quick ones of other tests copy less. The slow ones are other products of the same
# facts.
@pytest.mark.parametrize(
    ("function", "num_tokens", "num_kv_heads", "block_size", "dtype", "kv_dtype"),
    [
        (step, 1, 2, 16, "uint16", "bfloat16"),
        (burst, 8, 2, 256, "uint16", "bfloat16"),
        pytest.param(burst, 8, 2, 16, "float32", None, marks=pytest.mark.slow),
        pytest.param(step, 1, 1, 16, "float32", None, marks=pytest.mark.slow),
        pytest.param(step, 1, 1, 256, "float32", None, marks=pytest.mark.slow),
        pytest.param(step, 8, 1, 16, "uint16", "bfloat16", marks=pytest.mark.slow),
        pytest.param(burst, 1, 1, 16, "uint16", "float16", marks=pytest.mark.slow),
    ],
)
def test_donated_pages_are_updated_in_place(
    function, num_tokens, num_kv_heads, block_size, dtype, kv_dtype
):
    num_reqs, max_blocks_per_req = (num_tokens + 1) // 2, min(num_tokens, 5)
    num_words = 2 * num_kv_heads * block_size * WIDTH
    pages = jax.ShapeDtypeStruct((NUM_LAYERS, NUM_BLOCKS_OF_POOL, num_words), dtype)
    q = jax.ShapeDtypeStruct((num_tokens, 4, WIDTH), jnp.float32)
    int_shapes = ((num_tokens,), (num_reqs, max_blocks_per_req), (num_reqs,), (num_reqs + 1,))
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in int_shapes)
    program = functools.partial(function, sizes=(num_kv_heads, block_size), kv_dtype=kv_dtype)
    compiled = jax.jit(program, donate_argnums=0).lower(pages, q, *integers).compile(AS_FOR_USERS)
    memory = compiled.memory_analysis()
    pages_bytes = pages.dtype.itemsize * int(np.prod(pages.shape))
    assert memory.alias_size_in_bytes >= pages_bytes
    # Buffers of the few blocks in use are under 0.2 %. One KV head of one row would be a quarter.
    assert memory.temp_size_in_bytes < pages_bytes // 100
