"""Tests of `latent_attention/reference.py` against attention in float64 NumPy, not paged."""

import numpy as np
import pytest

from pallas_kernels.latent_attention.cases import CASES, build_inputs
from pallas_kernels.latent_attention.reference import latent_attention_reference

pytestmark = pytest.mark.thorough


PROMISE_NOTHING = {"kv_dtype": None, "max_query_len": None}


def dense_attention(inputs):
    """float64 attention of one token and head at a time, on contiguous vectors."""
    q = inputs.q_np.astype(np.float64)
    query_start_loc = np.asarray(inputs.query_start_loc)
    latent_dim = inputs.q_latent.shape[-1]
    out, lse = np.zeros((*q.shape[:2], latent_dim)), np.full(q.shape[:2], -np.inf)
    for req_idx, cached in enumerate(inputs.cached_np):
        start, end = query_start_loc[req_idx : req_idx + 2]
        for token in range(start, end):
            seen = cached[: len(cached) - (end - 1 - token)].astype(np.float64)
            for head in range(q.shape[1] if len(seen) else 0):
                weights = np.exp(seen @ q[token, head] * inputs.rules["scale"])
                out[token, head] = weights @ seen[:, :latent_dim] / weights.sum()
                lse[token, head] = np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_on_contiguous_latents(case, attend_by_reference):
    tolerance = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]
    out, lse = attend_by_reference(case)
    wanted_out, wanted_lse = dense_attention(build_inputs(case))
    np.testing.assert_allclose(out, wanted_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5)


def test_absorbed_attention_equals_attention_on_expanded_keys_and_values(run_jitted):
    num_heads, latent_dim, rope_dim, nope_dim, v_dim = 4, 24, 8, 12, 10
    block_size, seq_len, scale = 8, 21, (nope_dim + rope_dim) ** -0.5
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((seq_len, latent_dim))
    rope_keys = rng.standard_normal((seq_len, rope_dim))  # one for all heads
    w_uk = rng.standard_normal((num_heads, nope_dim, latent_dim))
    w_uv = rng.standard_normal((num_heads, v_dim, latent_dim))
    q_nope = rng.standard_normal((num_heads, nope_dim)) / 4
    q_rope = rng.standard_normal((num_heads, rope_dim)) / 4

    expanded_out = np.zeros((num_heads, v_dim))
    for head in range(num_heads):
        keys = np.concatenate([latents @ w_uk[head].T, rope_keys], axis=1)
        values = latents @ w_uv[head].T
        weights = np.exp(scale * keys @ np.concatenate([q_nope[head], q_rope[head]]))
        expanded_out[head] = weights @ values / weights.sum()

    cached = np.concatenate([latents, rope_keys], axis=1)
    padded = np.concatenate([cached, np.full((3, cached.shape[1]), np.nan)])
    kv_cache = padded.reshape(1, 3, 1, block_size, -1).astype(np.float32)
    q_latent = np.einsum("hn,hnl->hl", q_nope, w_uk)
    out, _ = run_jitted(
        latent_attention_reference,
        *(q[None].astype(np.float32) for q in (q_latent, q_rope)),
        kv_cache,
        np.int32(0),
        np.array([[0, 1, 2]], np.int32),
        np.array([seq_len], np.int32),
        np.array([0, 1], np.int32),
        **({"scale": scale} | PROMISE_NOTHING),
    )
    absorbed_out = np.einsum("hl,hvl->hv", out[0], w_uv)
    np.testing.assert_allclose(absorbed_out, expanded_out, rtol=1e-4, atol=1e-5)


def test_two_tokens_by_hand(run_jitted):
    # latent_dim 1, rope_dim 1. q [1, 2], cached [4, 0] and [8, ln(3)/2 - 2]: logits 4 and
    # 8 + ln 3 - 4 = 4 + ln 3, weights [1/4, 3/4], so the output is 7 and the lse 4 + ln 4.
    cached = np.array([[4.0, 0.0], [8.0, np.log(3) / 2 - 2]], np.float32)
    kv_cache = np.zeros((1, 2, 1, 8, 2), np.float32)
    kv_cache[0, 1, 0, :2] = cached
    out, lse = run_jitted(
        latent_attention_reference,
        *(np.array([[[q]]], np.float32) for q in (1, 2)),
        kv_cache,
        np.int32(0),
        np.array([[1]], np.int32),
        np.array([2], np.int32),
        np.array([0, 1], np.int32),
        **({"scale": 1.0} | PROMISE_NOTHING),
    )
    np.testing.assert_allclose(out[0, 0], [7.0], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], 4 + np.log(4), rtol=1e-6)
