"""Keys with a bias of logits, computed from the values of their token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.layers.dynamic_mask_attention import DynamicMaskAttention, with_key_bias
from tests import on_device
from tests.models.plain_context import plain_context

HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS, NUM_TOKENS = 6, 4, 2, 5
CONFIG = with_key_bias(
    AttentionConfig(
        hidden_size=8,
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rope=RopeConfig(),
        scale=HEAD_DIM**-0.5,
        qkv_bias=True,
    )
)


def project(dtype: str):
    """Queries, keys and values of random weights, and the bias as float64 has it."""
    attention = DynamicMaskAttention(CONFIG, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(3)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.dt_proj)
    for param in [attention.rate, *(part for one in linears for part in (one.kernel, one.bias))]:
        shape = param.get_value().shape
        param[...] = on_device.array(rng.normal(scale=0.5, size=shape), param.get_value().dtype)
    context = plain_context(NUM_TOKENS)
    angles = on_device.zeros((NUM_TOKENS, HEAD_DIM // 2), jnp.float32)
    context.cos_sin[CONFIG.rotary] = (jnp.cos(angles), jnp.sin(angles))

    @jax.jit
    def run(hidden):
        q, k, v = attention.project_in(hidden, context, norm=lambda x: x)
        return q, k, v, attention.dt_proj(v.reshape(NUM_TOKENS, -1), context)

    *qkv, dt = run(on_device.array(rng.normal(size=(NUM_TOKENS, 8)), dtype))
    rate_np, dt_np = (np.asarray(x, np.float64) for x in (attention.rate[...], dt))
    return *qkv, np.exp(rate_np * np.log1p(np.exp(dt_np)))


def logits_np(q: jax.Array, k: jax.Array, width: slice) -> np.ndarray:
    """f64[num_tokens, num_q_heads, num_tokens], from these dimensions of the heads."""
    q_np, k_np = (np.asarray(x, np.float64)[..., width] for x in (q, k))
    k_np = k_np.repeat(NUM_Q_HEADS // NUM_KV_HEADS, axis=1)
    return np.einsum("qhd,khd->qhk", q_np, k_np) * CONFIG.scale


# In bfloat16 alone, the bias would be off by up to 2e-3 of it.
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"),
    [
        ("float32", "float32", 1e-6),
        ("float32", "bfloat16", 2e-5),
        ("float32", "float16", 2e-5),
        ("bfloat16", "bfloat16", 2e-5),
        ("float16", "float16", 2e-5),
    ],
)
def test_logits_have_the_bias_of_their_key(dtype, cache_dtype, tolerance):
    q, k, v, bias_np = project(dtype)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (HEAD_DIM + 2, HEAD_DIM + 2, HEAD_DIM)
    assert {x.dtype for x in (q, k, v)} == {jnp.dtype(dtype)}
    added = logits_np(q, k.astype(cache_dtype), slice(HEAD_DIM, None))
    wanted = bias_np.T.repeat(NUM_Q_HEADS // NUM_KV_HEADS, axis=0)
    np.testing.assert_allclose(added, np.broadcast_to(wanted, added.shape), rtol=tolerance)
    assert bias_np.std(axis=0).min() > 0.01


def test_heads_are_rotated_and_stored_as_if_there_were_no_bias():
    assert (CONFIG.head_dim, CONFIG.value_head_dim) == (HEAD_DIM + 2, HEAD_DIM)
    assert CONFIG.rotary == (RopeConfig(), HEAD_DIM)
    attention = DynamicMaskAttention(CONFIG, dtype=jnp.float32)
    assert attention.q_proj.kernel.get_value().shape == (8, NUM_Q_HEADS * HEAD_DIM)
    assert attention.k_proj.kernel.get_value().shape == (8, NUM_KV_HEADS * HEAD_DIM)
    (source,) = attention.weight_rules("model.layers.0.self_attn")["rate"].sources
    assert (source.name, source.shape) == ("model.layers.0.self_attn.A", (NUM_KV_HEADS,))
