"""Differences of two softmaxes, against a computation in NumPy that does not pair heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.errors import ModelConfigError
from models.layers.differential_attention import DifferentialAttention, with_paired_heads
from tests import on_device
from tests.models.plain_context import plain_context

HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS, NUM_TOKENS, HIDDEN, EPS = 6, 8, 4, 5, 10, 1e-5
PLAIN = AttentionConfig(
    hidden_size=HIDDEN,
    num_q_heads=NUM_Q_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    rope=RopeConfig(),
    scale=HEAD_DIM**-0.5,
    qkv_bias=True,
    out_bias=True,
)
CONFIG = with_paired_heads(PLAIN)
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def make_attention(dtype: str = "float32") -> DifferentialAttention:
    """The layer with random weights."""
    attention = DifferentialAttention(CONFIG, eps=EPS, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(3)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    params = [part for one in linears for part in (one.kernel, one.bias)]
    for param in [*params, *(getattr(attention, name) for name in LAMBDAS)]:
        shape = param.get_value().shape
        param[...] = on_device.array(rng.normal(scale=0.5, size=shape), param.get_value().dtype)
    return attention


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attend_np(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """f64[num_tokens, heads, v_head_dim] of causal grouped-query attention."""
    k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = np.einsum("qhd,khd->hqk", q, k) * PLAIN.scale
    logits += np.triu(np.full(logits.shape[1:], -np.inf), 1)
    return np.einsum("hqk,khd->qhd", softmax(logits), v)


def wanted_np(attention: DifferentialAttention, x: np.ndarray, layer_idx: int) -> np.ndarray:
    """The output as the paper defines it. All positions have the angle 0."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        of_name = getattr(attention, name)
        return x @ np.asarray(of_name.kernel[...]) + np.asarray(of_name.bias[...])

    q, k, v = (linear(f"{name}_proj", x).reshape(NUM_TOKENS, -1, HEAD_DIM) for name in "qkv")
    half = NUM_Q_HEADS // 2
    both = np.concatenate(np.split(v, 2, axis=1), axis=-1)
    first = attend_np(q[:, :half], k[:, : NUM_KV_HEADS // 2], both)
    second = attend_np(q[:, half:], k[:, NUM_KV_HEADS // 2 :], both)
    q1, k1, q2, k2 = (np.asarray(getattr(attention, name)[...], np.float64) for name in LAMBDAS)
    start = 0.8 - 0.6 * np.exp(-0.3 * layer_idx)
    heads = first - (np.exp(q1 @ k1) - np.exp(q2 @ k2) + start) * second
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + EPS)
    return linear("o_proj", ((1 - start) * normed).reshape(NUM_TOKENS, -1))


@pytest.mark.parametrize("layer_idx", [0, 3])
def test_output_is_the_normed_difference_of_the_halves(layer_idx):
    attention = make_attention()
    angles = on_device.zeros((NUM_TOKENS, HEAD_DIM // 2), jnp.float32)
    context = plain_context(NUM_TOKENS)
    context.cos_sin[CONFIG.rotary] = (jnp.cos(angles), jnp.sin(angles))
    x = np.random.default_rng(4).normal(size=(NUM_TOKENS, HIDDEN))

    # As in a loop over layers, the number is traced.
    @jax.jit
    def project_out(attended, layer_idx):
        return attention.project_out(attended, dataclasses.replace(context, layer_idx=layer_idx))

    project_in = jax.jit(lambda x: attention.project_in(x, context, norm=lambda x: x))
    qkv = project_in(on_device.array(x, jnp.float32))
    assert [one.shape[1:] for one in qkv] == [(8, 12), (2, 12), (2, 12)]
    attended = attend_np(*(np.asarray(one, np.float64) for one in qkv))
    got = project_out(on_device.array(attended, jnp.float32), layer_idx)
    np.testing.assert_allclose(got, wanted_np(attention, x, layer_idx), rtol=1e-4, atol=1e-4)


def test_output_has_the_dtype_of_the_heads():
    attention = make_attention("bfloat16")
    context = dataclasses.replace(plain_context(NUM_TOKENS), layer_idx=1)
    heads = jax.ShapeDtypeStruct((NUM_TOKENS, NUM_Q_HEADS, 2 * HEAD_DIM), jnp.bfloat16)
    out = jax.eval_shape(lambda heads: attention.project_out(heads, context), heads)
    assert out.dtype == jnp.bfloat16


def test_cache_has_wide_heads_and_stores_no_value_twice():
    assert (CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.value_head_dim) == (2, 12, 12)
    assert CONFIG.num_kv_heads * CONFIG.kv_width == PLAIN.num_kv_heads * PLAIN.kv_width
    assert (CONFIG.rotary, CONFIG.scale) == (PLAIN.rotary, PLAIN.scale)
    with pytest.raises(ModelConfigError, match="num_key_value_heads=1 is odd"):
        with_paired_heads(dataclasses.replace(PLAIN, num_kv_heads=1))


def test_weights_have_the_names_and_shapes_of_checkpoints():
    attention = make_attention()
    assert attention.k_proj.kernel.get_value().shape == (HIDDEN, NUM_KV_HEADS * HEAD_DIM)
    assert attention.o_proj.kernel.get_value().shape == (NUM_Q_HEADS * HEAD_DIM, HIDDEN)
    rules = attention.weight_rules("model.layers.0.self_attn")
    assert {name: rule.sources[0].name for name, rule in rules.items()} == {
        name: f"model.layers.0.self_attn.{name}" for name in LAMBDAS
    }
    assert {rule.sources[0].shape for rule in rules.values()} == {(HEAD_DIM,)}
