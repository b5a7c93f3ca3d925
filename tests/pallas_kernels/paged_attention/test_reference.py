"""Tests of `paged_attention/reference.py` against dense attention in float64 NumPy, not paged."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES, LONG_CASES, UINT16_CASES, build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.quick_compile import slow_unless_named

pytestmark = pytest.mark.thorough


def dense_attention(inputs):
    """Softmax attention of one query token and head at a time, on contiguous keys and values.

    The set of keys that a token sees is written down position by position, from the words of the
    contract; nothing here knows of blocks.
    """
    q = np.asarray(inputs.q).astype(np.float64)
    rules = inputs.rules
    query_start_loc = np.asarray(inputs.query_start_loc)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = inputs.kv_cache.shape[2]
    out = np.zeros(q.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for req_idx, (keys, values) in enumerate(zip(inputs.keys_np, inputs.values_np, strict=True)):
        start, end = query_start_loc[req_idx], query_start_loc[req_idx + 1]
        for token_idx in range(start, end):
            position = len(keys) - (end - token_idx)
            seen = [j for j in range(len(keys)) if sees(rules, position, j)]
            if not seen:
                continue
            for head in range(num_q_heads):
                kv_head = head // (num_q_heads // num_kv_heads)
                products = keys[seen, kv_head].astype(np.float64) @ q[token_idx, head]
                logits = products * rules["scale"]
                if rules["soft_cap"] is not None:
                    logits = rules["soft_cap"] * np.tanh(logits / rules["soft_cap"])
                weights = np.exp(logits)
                denominator = weights.sum()
                if inputs.sinks is not None:
                    denominator += np.exp(float(inputs.sinks[head]))
                out[token_idx, head] = weights @ values[seen, kv_head] / denominator
                lse[token_idx, head] = np.log(denominator)
    return out, lse


def sees(rules, position, key_position):
    """Whether a query token at `position` reads the key at `key_position`."""
    if not rules["is_causal"]:
        return True
    if rules["sliding_window"] is not None:
        return position - rules["sliding_window"] < key_position <= position
    if rules["chunk_size"] is not None:
        first = position - position % rules["chunk_size"]
        return first <= key_position <= position
    return key_position <= position


# Every rule, dtype and edge once. The other cases run with `pytest -m slow`.
QUICK_CASES = (
    "decode_mha",
    "mixed_head_dim_80",
    "mixed_window",
    "window_of_one",
    "mixed_soft_cap",
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
def test_equals_dense_attention_on_contiguous_sequences(case, attend_by_reference):
    out, lse = attend_by_reference(case)
    expected_out, expected_lse = dense_attention(build_inputs(case))
    tolerance = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    # The lse is float32 whatever q's dtype is.
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=2e-6)


@pytest.mark.parametrize("case", slow_unless_named(LONG_CASES, "decode_131072"))
def test_equals_dense_attention_at_the_greatest_length(case, attend_by_reference):
    out, lse = attend_by_reference(case)
    expected_out, expected_lse = dense_attention(build_inputs(case))
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)


def test_two_tokens_by_hand(run_jitted):
    # One head of size 1, two tokens at positions 0 and 1 of block 1. Token 1: logits [0, ln 3],
    # weights [1/4, 3/4], values [4, 8] -> 7. Token 0 sees only itself -> 4.
    # Its keys are entry 2 of the cache, its values entry 3.
    kv_cache = jnp.zeros((1, 4, 1, 8, 1)).at[0, 2, 0, :2, 0].set(jnp.array([0.0, jnp.log(3.0)]))
    kv_cache = kv_cache.at[0, 3, 0, :2, 0].set(jnp.array([4.0, 8.0]))
    out, lse = run_jitted(
        paged_attention_reference,
        jnp.ones((2, 1, 1)),
        kv_cache,
        jnp.int32(0),
        jnp.array([[1]], jnp.int32),
        jnp.array([2], jnp.int32),
        jnp.array([0, 2], jnp.int32),
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
