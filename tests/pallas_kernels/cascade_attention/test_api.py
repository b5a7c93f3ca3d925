"""Tests of `cascade_attention/api.py` against `paged_attention` without a cascade."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_attention
from pallas_kernels.cascade_attention.api import cascade_attention
from pallas_kernels.cascade_attention.cases import CASES, CascadeAttentionCase, build_inputs
from pallas_kernels.paged_attention.cases import PagedAttentionCase

TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2}


def options_of(inputs):
    """The arguments that both ops take by name."""
    rules = {name: inputs.rules[name] for name in ("scale", "soft_cap", "max_query_len")}
    return rules | {"return_lse": True}


def attend(run_jitted, inputs, op, *more_arrays, **options):
    def call(traced_options, *arrays):
        return op(*arrays, **traced_options, **options_of(inputs), **options)

    out, lse = run_jitted(call, inputs.traced_options, *inputs.arrays, *more_arrays)
    return np.asarray(out).astype(np.float32), np.asarray(lse)


WITH_REFERENCE = ("two_blocks", "nothing_common", "soft_cap_and_sinks")


@pytest.mark.parametrize(
    ("case", "implementation"),
    [(case, "xla") for case in CASES]
    + [(case, "reference") for case in CASES if case.name in WITH_REFERENCE],
    ids=lambda value: getattr(value, "name", value),
)
def test_equals_paged_attention(case, implementation, run_jitted):
    inputs = build_inputs(case)
    out, lse = attend(
        *(run_jitted, inputs, cascade_attention, jnp.int32(case.num_common_blocks)),
        implementation=implementation,
    )
    expected = attend(run_jitted, inputs, paged_attention, implementation="reference")
    tolerance = TOLERANCES[case.batch.dtype]
    np.testing.assert_allclose(out, expected[0], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected[1], atol=5e-6, rtol=5e-6)


def test_common_blocks_are_read_through_one_request(run_jitted):
    """The others' entries for them may hold anything, so nothing reads them once a request."""
    case = next(case for case in CASES if case.name == "decode")
    inputs = build_inputs(case)
    first = next(i for i, (num_query, _) in enumerate(case.batch.requests) if num_query)
    is_other = np.arange(len(case.batch.requests)) != first
    block_tables_np = np.array(inputs.block_tables)
    block_tables_np[is_other, : case.num_common_blocks] = -(2**20)

    def call(block_tables):
        arrays = list(inputs.arrays)
        arrays[4] = block_tables
        num_common_blocks = jnp.int32(case.num_common_blocks)
        options = options_of(inputs) | {"implementation": "xla"}
        return cascade_attention(*arrays, num_common_blocks, **options)[0]

    garbage, plain = (run_jitted(call, t) for t in (block_tables_np, inputs.block_tables))
    np.testing.assert_array_equal(garbage, plain)


# One padded shape for all drawn batches, so that each op compiles once.
MAX_TOKENS, MAX_REQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE = 48, 4, 8, 40, 8


@st.composite
def batches(draw):
    """Draws a batch, with prefixes as long as every query token allows, or longer, or shorter."""
    requests, room = [], MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_REQS))):
        seq_len = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE))
        num_query = min(draw(st.sampled_from([0, 1, 2, 30])), seq_len, room)
        room -= num_query
        requests.append((num_query, seq_len))
    requests += [(0, 0)] * (MAX_REQS - len(requests))
    before_query = [seq_len - num_query for num_query, seq_len in requests if num_query]
    most = min(before_query, default=0) // BLOCK_SIZE
    num_common_blocks = draw(st.sampled_from([0, most, most // 2, MAX_BLOCKS]))
    batch = PagedAttentionCase(
        name="drawn",
        requests=tuple(requests),
        num_padding_tokens=room,
        max_blocks_per_req=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        head_dim=8,
        has_sinks=True,
        soft_cap=3.0,
    )
    return CascadeAttentionCase(name="drawn", num_common_blocks=num_common_blocks, batch=batch)


@pytest.fixture(scope="module")
def compiled_ops():
    def compile_op(op, **options):
        def call(sinks, *arrays):
            options_of_all = {"scale": 0.3, "soft_cap": 3.0, "return_lse": True}
            return op(*arrays, sinks=sinks, **options_of_all, **options)

        return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})

    return (
        compile_op(cascade_attention, implementation="xla"),
        compile_op(paged_attention, implementation="reference"),
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=batches(), seed=st.integers(0, 1000))
def test_equals_paged_attention_on_any_batch(compiled_ops, case, seed):
    inputs = build_inputs(case, seed)
    pad_blocks = ((0, 0), (0, NUM_BLOCKS - inputs.k_cache.shape[1]), (0, 0), (0, 0), (0, 0))
    k_cache, v_cache = (
        np.pad(np.asarray(cache), pad_blocks, constant_values=np.nan)
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    arrays = (inputs.sinks, inputs.q, k_cache, v_cache, jnp.int32(1), *inputs.arrays[4:])
    cascade, plain = compiled_ops
    got = cascade(*arrays, jnp.int32(case.num_common_blocks))
    for got_array, wanted in zip(got, plain(*arrays), strict=True):
        np.testing.assert_allclose(got_array, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_common_blocks": jnp.zeros(1, jnp.int32)}, r"num_common_blocks must be one integer"),
        ({"num_common_blocks": jnp.float32(1)}, r"must be one integer: got float32\[\]"),
        (
            {"block_tables": jnp.zeros(3, jnp.int32)},
            "cascade_attention: block_tables has",
        ),
        ({"seq_lens": jnp.zeros(9, jnp.int32)}, r"cascade_attention: seq_lens .* got \[9\]"),
        ({"query_start_loc": jnp.zeros(3, jnp.int32)}, r"query_start_loc .* got \[3\]"),
        ({"k_cache": jnp.zeros((2, 2))}, r"cascade_attention: k_cache .* got \[2, 2\]"),
        ({"soft_cap": 0.0}, "soft_cap is out of range: got 0.0"),
        ({"implementation": "triton"}, "got 'triton', wanted None or one of .*'xla'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    inputs = build_inputs(CASES[0])
    names = ("q", "k_cache", "v_cache", "row", "block_tables", "seq_lens", "query_start_loc")
    arguments = dict(zip(names, inputs.arrays, strict=True)) | {"num_common_blocks": jnp.int32(1)}
    with pytest.raises(ValueError, match=message):
        cascade_attention(**(arguments | {"scale": 1.0} | changes))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=["no tokens", "no requests", "no blocks"]
)
def test_where_there_is_nothing_to_see_the_result_says_so(sizes, return_lse):
    num_tokens, num_reqs, max_blocks_per_req = sizes
    cache = jnp.full((1, 5, 2, 8, 16), jnp.nan)
    result = cascade_attention(
        *(jnp.ones((num_tokens, 4, 16)), cache, cache, 0),
        jnp.zeros((num_reqs, max_blocks_per_req), jnp.int32),
        jnp.zeros(num_reqs, jnp.int32),
        jnp.zeros(num_reqs + 1, jnp.int32),
        jnp.int32(2),
        scale=1.0,
        return_lse=return_lse,
    )
    out, lse = result if return_lse else (result, jnp.full((num_tokens, 4), -jnp.inf))
    np.testing.assert_array_equal(out, np.zeros((num_tokens, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((num_tokens, 4), -np.inf))
