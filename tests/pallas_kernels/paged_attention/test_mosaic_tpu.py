"""Tests of `paged_attention/mosaic_tpu.py`, interpreted and lowered: no TPU is needed.

`tests/aot/test_tpu.py` compiles the kernel for real chips.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.cases import CASES, PagedAttentionCase, build_inputs
from pallas_kernels.paged_attention.mosaic_tpu import misfit, paged_attention_mosaic_tpu
from pallas_kernels.target import Target
from tests.pallas_kernels.paged_attention.dense_attention import dense_attention
from tests.quick_compile import slow_unless_named

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}
# The random batches have chunks, a soft cap and sinks, and a simulated case has a window. Each case
# compiles a program, which takes seconds.
QUICK_CASES = ("not_causal",)


def assert_close(got, wanted, dtype):
    tolerance = TOLERANCES[dtype]
    for got_array, wanted_array in zip(got, wanted, strict=True):
        got_array, wanted_array = (np.asarray(x, np.float32) for x in (got_array, wanted_array))
        np.testing.assert_allclose(got_array, wanted_array, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_dense_attention(case, attend):
    inputs = build_inputs(case)
    got = attend(inputs, paged_attention_mosaic_tpu, interpret=True)
    assert_close(got, dense_attention(inputs), case.dtype)


# Several KV tiles (of 512 keys at most), query tiles that requests share, and windows around one
# token next to whole tiles: wrong data that a pass leaves for the next pass shows here.
LONG_CASE = PagedAttentionCase(
    name="long",
    requests=((1, 1100), (70, 700), (1, 520), (1, 3), (0, 0), (30, 30)),
    num_q_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_size=32,
    soft_cap=20.0,
    has_sinks=True,
)
SIMULATED_CASES = [
    LONG_CASE,
    PagedAttentionCase(
        name="window_of_decodes",
        requests=((1, 1100), (1, 600), (0, 0), (1, 2)),
        num_q_heads=6,
        head_dim=128,
        block_size=64,
        sliding_window=530,
    ),
]


@pytest.mark.parametrize("case", slow_unless_named(SIMULATED_CASES, "window_of_decodes"))
def test_nothing_races_where_copies_finish_late(case, attend, capfd):
    """Copies happen when they are waited for, and memory holds NaN until then."""
    inputs = build_inputs(case)
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    got = attend(inputs, paged_attention_mosaic_tpu, interpret=params)
    # JAX 0.12 raises at a race, older ones print it and carry on.
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err
    assert_close(got, dense_attention(inputs), case.dtype)


# One padded shape for all drawn batches, so that the kernel compiles once.
MAX_TOKENS, MAX_REQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE = 150, 5, 20, 120, 32
RULES = {"chunk_size": 140, "soft_cap": 2.0}


@st.composite
def ragged_requests(draw):
    """Draws (query tokens, seq_len) of up to MAX_REQS requests that fit MAX_TOKENS."""
    requests, room = [], MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_REQS))):
        seq_len = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE))
        num_query = draw(st.sampled_from([0, 1, 2, 17, 40, 150]))
        num_query = min(num_query, seq_len, room)
        room -= num_query
        requests.append((num_query, seq_len))
    return tuple(requests) + ((0, 0),) * (MAX_REQS - len(requests))


@settings(max_examples=12)  # each takes the interpreter a while
@given(
    requests=ragged_requests(),
    seed=st.integers(0, 1000),
)
def test_equals_dense_attention_on_any_ragged_batch(attend, requests, seed):
    num_query = sum(num_query for num_query, _ in requests)
    case = PagedAttentionCase(
        name="drawn",
        requests=requests,
        num_padding_tokens=MAX_TOKENS - num_query,
        max_blocks_per_req=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        num_q_heads=6,
        head_dim=8,
        has_sinks=True,
        **RULES,
    )
    inputs = build_inputs(case, seed)
    pad_blocks = ((0, 0), (0, 2 * NUM_BLOCKS - inputs.kv_cache.shape[1]), (0, 0), (0, 0), (0, 0))
    kv_cache_np = np.pad(np.asarray(inputs.kv_cache), pad_blocks, constant_values=np.nan)
    inputs = dataclasses.replace(
        inputs,
        kv_cache=jnp.asarray(kv_cache_np),
        row=jnp.int32(1),
        rules=inputs.rules | {"max_query_len": None},
    )
    got = attend(inputs, paged_attention_mosaic_tpu, interpret=True)
    assert_close(got, dense_attention(inputs), "float32")


def described(
    num_tokens=64,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    max_blocks_per_req=64,
    num_reqs=8,
):
    """Arrays of a call, by shape and dtype alone."""
    array, cache_dtype = jax.ShapeDtypeStruct, cache_dtype or dtype
    return (
        array((num_tokens, num_q_heads, head_dim), dtype),
        array((2, 1024, num_kv_heads, block_size, head_dim), cache_dtype),
        array((), jnp.int32),
        array((num_reqs, max_blocks_per_req), jnp.int32),
        array((num_reqs,), jnp.int32),
        array((num_reqs + 1,), jnp.int32),
    )


PLAIN_RULES = {
    "scale": 0.1,
    "is_causal": True,
    "sliding_window": None,
    "chunk_size": None,
    "soft_cap": None,
    "sinks": None,
    "alibi_slopes": None,
    "kv_dtype": None,
    "max_query_len": None,
}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": jnp.float16}, "q is float16"),
        ({"cache_dtype": jnp.float16}, "kv_cache is float16"),
        ({"cache_dtype": jnp.uint16}, "kv_cache is uint16"),
        ({"head_dim": 64}, "kv_cache has head_dim 64"),
        ({"head_dim": 192}, "kv_cache has head_dim 192"),
        ({"block_size": 12}, "block_size is 12"),
        ({"max_blocks_per_req": 2**17}, "bytes of SMEM"),
        (
            {"num_q_heads": 64, "num_kv_heads": 64, "block_size": 512, "dtype": jnp.float32},
            "bytes of VMEM",
        ),
    ],
    ids=str,
)
def test_misfit_names_what_does_not_fit(sizes, reason):
    assert reason in misfit(*described(**sizes), **PLAIN_RULES)


CONFIGURATIONS = {
    "base": ({}, {}),
    "everything_decode_float32": (
        {"dtype": jnp.float32, "num_q_heads": 24, "block_size": 8, "head_dim": 256},
        {"max_query_len": 1, "sliding_window": 100, "soft_cap": 30.0},
    ),
    "chunks": ({"block_size": 256}, {"chunk_size": 96}),
}


@pytest.mark.parametrize(
    ("name", "device_kind"),
    [
        *((name, "TPU v5 lite") for name in CONFIGURATIONS),
        pytest.param("base", "TPU v6 lite", marks=pytest.mark.slow),
        pytest.param("everything_decode_float32", "TPU v6 lite", marks=pytest.mark.slow),
        pytest.param("chunks", "TPU v6 lite", marks=pytest.mark.slow),
    ],
)
def test_op_picks_it_for_a_tpu_and_it_lowers(name, device_kind):
    sizes, rules = CONFIGURATIONS[name]
    arrays = described(**sizes)
    target = Target(platform="tpu", device_kind=device_kind)

    def call(*arrays):
        return paged_attention(*arrays, **{**PLAIN_RULES, **rules}, target=target)

    chip = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 1


def test_op_runs_it_by_name():
    arrays = described()
    options = {"scale": 0.1, "implementation": "mosaic_tpu_interpret"}
    jaxpr = str(jax.make_jaxpr(functools.partial(paged_attention, **options))(*arrays))
    body = functools.partial(paged_attention_mosaic_tpu, **PLAIN_RULES, interpret=True)
    assert "pallas_call" in jaxpr
    assert jaxpr.count(" = ") == str(jax.make_jaxpr(body)(*arrays)).count(" = ")
