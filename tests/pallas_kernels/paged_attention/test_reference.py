"""Tests of `paged_attention/reference.py` against dense attention in float64 NumPy, not paged."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES, LONG_CASES, UINT16_CASES, build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests import on_device
from tests.pallas_kernels.paged_attention.dense_attention import dense_attention
from tests.quick_compile import slow_unless_named

# Every rule, dtype and edge once: a window, a soft cap and sinks are in the cases with everything.
# The other cases run with `pytest -m slow`.
QUICK_CASES = (
    "mixed_head_dim_80",
    "window_of_one",
    "mixed_chunks",
    "custom_scale",
    "empty_requests",
    "padding_only",
    "not_causal",
    "mixed_float16",
    "everything_float32",
    "everything_bfloat16",
    "bfloat16_as_uint16",
    "float32_over_float16_as_uint16",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES + UINT16_CASES, *QUICK_CASES))
def test_equals_dense_attention_on_contiguous_sequences(case, attend):
    inputs = build_inputs(case)
    out, lse = attend(inputs, paged_attention_reference)
    expected_out, expected_lse = dense_attention(inputs)
    tolerance = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    # The lse is float32 whatever q's dtype is.
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=2e-6)


@pytest.mark.parametrize("case", slow_unless_named(LONG_CASES, "decode_131072"))
def test_equals_dense_attention_at_the_greatest_length(case, attend):
    inputs = build_inputs(case)
    out, lse = attend(inputs, paged_attention_reference)
    expected_out, expected_lse = dense_attention(inputs)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)


def test_two_tokens_by_hand(run_jitted):
    # One head of size 1, two tokens at positions 0 and 1 of block 1. Token 1: logits [0, ln 3],
    # weights [1/4, 3/4], values [4, 8] -> 7. Token 0 sees only itself -> 4.
    # Its keys are entry 2 of the cache, its values entry 3.
    kv_cache = np.zeros((1, 4, 1, 8, 1), np.float32)
    kv_cache[0, 2, 0, :2, 0] = [0.0, np.log(3.0)]
    kv_cache[0, 3, 0, :2, 0] = [4.0, 8.0]
    out, lse = run_jitted(
        paged_attention_reference,
        on_device.ones((2, 1, 1)),
        kv_cache,
        jnp.int32(0),
        on_device.array([[1]], jnp.int32),
        on_device.array([2], jnp.int32),
        on_device.array([0, 2], jnp.int32),
        scale=1.0,
        is_causal=True,
        sliding_window=None,
        chunk_size=None,
        soft_cap=None,
        sinks=None,
        alibi_slopes=None,
        kv_dtype=None,
        max_query_len=None,
    )
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 7.0], rtol=1e-6)
    # The logits' sums of exponentials are 1 and 1 + 3.
    np.testing.assert_allclose(lse[:, 0], [0.0, np.log(4.0)], rtol=1e-6, atol=1e-7)
