"""Tests of `latent_attention/reference.py` against attention in float64 NumPy, not paged."""

import numpy as np
import pytest

from pallas_kernels.latent_attention.cases import CASES, build_inputs
from pallas_kernels.latent_attention.reference import latent_attention_reference
from tests.pallas_kernels.latent_attention.dense_attention import dense_attention
from tests.quick_compile import slow_unless_named

PROMISE_NOTHING = {"kv_dtype": None, "max_query_len": None}


# Each kind of request, and each way to store the cache except float16 as float16. The other cases
# have large blocks, long contexts, or sizes of DeepSeek's models and of a kernel's tiles.
QUICK_CASES = (
    "ragged_decodes",
    "empty_and_idle_requests",
    "padding_only",
    "one_block",
    "block_8",
    "mixed",
    "mixed_with_unused_columns",
    "mixed_bfloat16_as_uint16",
    "mixed_float16_as_uint16",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_dense_attention_on_contiguous_latents(case, attend):
    tolerance = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]
    inputs = build_inputs(case)
    out, lse = attend(inputs, latent_attention_reference)
    wanted_out, wanted_lse = dense_attention(inputs)
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
