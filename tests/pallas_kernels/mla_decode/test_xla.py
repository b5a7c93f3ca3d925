"""Tests of `mla_decode/xla.py`: against the reference, and its promises on memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import block_copy, kv_scatter, mla_decode
from pallas_kernels.mla_decode.cases import CASES, MLADecodeCase, build_inputs
from pallas_kernels.mla_decode.reference import mla_decode_reference
from pallas_kernels.mla_decode.xla import mla_decode_xla
from tests.compiler_flags import AS_FOR_USERS
from tests.quick_compile import slow_unless_named

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}


QUICK_CASES = (
    "empty_and_idle_requests",
    "padding_only",
    "many_chunks",
    "block_8",
    "deepseek_heads_16",
    "deepseek_heads_128_float16",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES, thorough=QUICK_CASES[2:5]))
def test_equals_reference(case, attend, attend_by_reference):
    pair = attend(build_inputs(case), mla_decode_xla)
    for got, wanted in zip(pair, attend_by_reference(case), strict=True):
        tolerance = TOLERANCES[case.dtype]
        np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)


def test_float32_queries_lose_nothing_to_a_narrower_cache(attend):
    inputs = build_inputs(MLADecodeCase(name="", requests=((1, 40), (1, 9))))
    inputs = dataclasses.replace(inputs, kv_cache=inputs.kv_cache.astype(jnp.bfloat16))
    pairs = (attend(inputs, body) for body in (mla_decode_xla, mla_decode_reference))
    for got, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=5e-6)


# One padded shape for all drawn batches, so that each body compiles once.
MAX_REQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE = 6, 8, 60, 8


@pytest.mark.thorough
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, MAX_BLOCKS * BLOCK_SIZE)),
        min_size=MAX_REQS,
        max_size=MAX_REQS,
    ),
    seed=st.integers(0, 1000),
)
def test_equals_reference_on_any_batch(run_jitted, requests, seed):
    num_query = sum(num_query for num_query, _ in requests)
    case = MLADecodeCase(
        name="drawn",
        requests=tuple(requests),
        num_padding_tokens=MAX_REQS + 2 - num_query,
        max_blocks_per_req=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        latent_dim=8,
        rope_dim=4,
    )
    inputs = build_inputs(case, seed)
    num_missing = NUM_BLOCKS - inputs.kv_cache.shape[1]
    pad_blocks = ((0, 0), (0, num_missing), (0, 0), (0, 0), (0, 0))
    kv_cache = np.pad(np.asarray(inputs.kv_cache), pad_blocks, constant_values=np.nan)
    arguments = (inputs.q, kv_cache, jnp.int32(1), *inputs.arrays[3:])
    bodies = (mla_decode_xla, mla_decode_reference)
    xla, reference = (run_jitted(body, *arguments, **inputs.rules) for body in bodies)
    for got, wanted in zip(xla, reference, strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=5e-6)


NUM_LAYERS, LATENT_DIM, ROPE_DIM = 3, 32, 16


def step(pages, q, slots, block_tables, seq_lens, query_start_loc):
    """Copies a block, then three layers that write to their row of the pages and read it."""
    kv_cache = block_copy(pages, slots[:1], slots[-1:]).reshape(
        *(NUM_LAYERS, -1, 1, BLOCK_SIZE, LATENT_DIM + ROPE_DIM)
    )
    for layer_idx in range(NUM_LAYERS):
        # As in a model, what a layer writes depends on what the layer before it read.
        latents = jnp.sin(q[:, :1])
        kv_cache = kv_scatter(kv_cache, latents, None, slots, layer_idx)
        out = mla_decode(
            *(q, kv_cache, layer_idx, block_tables, seq_lens, query_start_loc),
            latent_dim=LATENT_DIM,
            scale=1.0,
        )
        q = q.at[..., :LATENT_DIM].add(out)
    return kv_cache.reshape(pages.shape), q


def memory_of_donated_step(num_blocks, num_tokens):
    """Compiles `step`, donating the pages; returns its memory analysis and their bytes."""
    num_reqs, cache_dim = num_tokens, LATENT_DIM + ROPE_DIM
    arguments = (
        jax.ShapeDtypeStruct((NUM_LAYERS, num_blocks, BLOCK_SIZE * cache_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, 4, cache_dim), jnp.float32),
        *(
            jax.ShapeDtypeStruct(dims, jnp.int32)
            for dims in ((num_tokens,), (num_reqs, 5), (num_reqs,), (num_reqs + 1,))
        ),
    )
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile(AS_FOR_USERS)
    return compiled.memory_analysis(), 4 * int(np.prod(arguments[0].shape))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_donated_pages_of_latents_are_updated_in_place(num_tokens):
    memory, pages_bytes = memory_of_donated_step(num_blocks=32_768, num_tokens=num_tokens)
    assert memory.alias_size_in_bytes >= pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes // 100  # a copy of one row would be a third


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_latents_are_written_and_copied(implementation):
    # Two tokens of width 3 go to slots 1 and 2 (block 0, block 1 of size 2); then block 1 -> 2.
    latents = jnp.array([[[1.0, 2, 3]], [[4, 5, 6]]])
    kv_cache = kv_scatter(
        *(jnp.zeros((2, 3, 1, 2, 3)), latents, None, jnp.array([1, 2]), 1),
        implementation=implementation,
    )
    ids = (jnp.array([1]), jnp.array([2]))
    kv_cache = block_copy(kv_cache, *ids, implementation=implementation)
    wanted = np.zeros((2, 3, 2, 3))
    wanted[1] = [[[0, 0, 0], [1, 2, 3]], [[4, 5, 6], [0, 0, 0]], [[4, 5, 6], [0, 0, 0]]]
    np.testing.assert_array_equal(kv_cache[:, :, 0], wanted)
