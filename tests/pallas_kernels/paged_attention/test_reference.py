"""Tests of `paged_attention/reference.py` against dense attention in float64 NumPy, not paged."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES, build_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference


def dense_attention(inputs):
    """Softmax attention of one query token and head at a time, on contiguous keys and values."""
    q = np.asarray(inputs.q).astype(np.float64)
    query_start_loc = np.asarray(inputs.query_start_loc)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, v_head_dim = inputs.v_cache.shape[2], inputs.v_cache.shape[-1]
    out = np.zeros((num_tokens, num_q_heads, v_head_dim))
    for req_idx, (keys, values) in enumerate(zip(inputs.keys_np, inputs.values_np, strict=True)):
        start, end = query_start_loc[req_idx], query_start_loc[req_idx + 1]
        for token_idx in range(start, end):
            position = len(keys) - (end - token_idx)
            window = inputs.sliding_window or position + 1
            seen = slice(max(0, position - window + 1), position + 1)
            for head in range(num_q_heads):
                kv_head = head // (num_q_heads // num_kv_heads)
                logits = keys[seen, kv_head].astype(np.float64) @ q[token_idx, head] * inputs.scale
                if inputs.soft_cap is not None:
                    logits = inputs.soft_cap * np.tanh(logits / inputs.soft_cap)
                weights = np.exp(logits)
                denominator = weights.sum()
                if inputs.sinks is not None:
                    denominator += np.exp(float(inputs.sinks[head]))
                out[token_idx, head] = weights @ values[seen, kv_head] / denominator
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_on_contiguous_sequences(case, attend_by_reference):
    expected = dense_attention(build_inputs(case))
    tolerance = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]
    np.testing.assert_allclose(attend_by_reference(case), expected, atol=tolerance, rtol=tolerance)


def test_two_tokens_by_hand(run_jitted):
    # One head of size 1, two tokens at positions 0 and 1 of block 1. Token 1: logits [0, ln 3],
    # weights [1/4, 3/4], values [4, 8] -> 7. Token 0 sees only itself -> 4.
    k_cache = jnp.zeros((1, 2, 1, 8, 1)).at[0, 1, 0, :2, 0].set(jnp.array([0.0, jnp.log(3.0)]))
    v_cache = jnp.zeros((1, 2, 1, 8, 1)).at[0, 1, 0, :2, 0].set(jnp.array([4.0, 8.0]))
    out = run_jitted(
        paged_attention_reference,
        jnp.ones((2, 1, 1)),
        k_cache,
        v_cache,
        jnp.int32(0),
        jnp.array([[1]], jnp.int32),
        jnp.array([2], jnp.int32),
        jnp.array([0, 2], jnp.int32),
        scale=1.0,
        sliding_window=None,
        soft_cap=None,
        sinks=None,
    )
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 7.0], rtol=1e-6)
