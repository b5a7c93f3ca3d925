"""Attention that norms last, scales queries, or clips what it projects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.layers.attention_variants import (
    ClippedAttention,
    NormedLastAttention,
    QueryScale,
    ScaledQueriesAttention,
)
from models.layers.rms_norm import RMSNorm
from tests import on_device
from tests.models.plain_context import plain_context

CONFIG = AttentionConfig(
    hidden_size=4, num_q_heads=2, num_kv_heads=1, head_dim=2, rope=RopeConfig(), scale=1.0
)
POSITIONS = np.arange(3)
X = np.array([[1.0, 2.0, -3.0, 4.0]] * 3, np.float32)


def project(attention):
    """Queries, keys and values of `X`; token i is at position i, and turned by i radians."""
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.kernel[...] = jnp.eye(*linear.kernel.get_value().shape)
    angles = on_device.array(POSITIONS, jnp.float32)[:, None]
    context = plain_context(3)
    context.cos_sin[CONFIG.rotary] = (jnp.cos(angles), jnp.sin(angles))
    return jax.jit(lambda x: attention.project_in(x, context, norm=lambda x: x))(X)


def turned(x: np.ndarray) -> np.ndarray:
    """Rows of pairs, turned by `POSITIONS` radians."""
    complex_np = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * POSITIONS)[:, None]
    return np.stack([complex_np.real, complex_np.imag], axis=-1)


def test_norms_come_after_the_rotation():
    norm = RMSNorm(2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 10.0])
    attention = NormedLastAttention(CONFIG, q_norm=norm, k_norm=norm, dtype=jnp.float32)
    q, k, v = project(attention)
    wanted = turned(X.reshape(3, 2, 2))
    wanted = wanted / np.sqrt((wanted**2).mean(-1, keepdims=True)) * [1.0, 10.0]
    np.testing.assert_allclose(q, wanted, rtol=1e-5)
    np.testing.assert_allclose(k, wanted[:, :1], rtol=1e-5)
    np.testing.assert_array_equal(v, X[:, None, :2])


def test_queries_grow_with_their_position_and_keys_do_not():
    scale = QueryScale(weight=0.5, period=2, offset=1)
    q, k, _ = project(ScaledQueriesAttention(CONFIG, query_scale=scale, dtype=jnp.float32))
    wanted = turned(X.reshape(3, 2, 2))
    factors = 1 + 0.5 * np.log([1, 2, 2])
    np.testing.assert_allclose(q, wanted * factors[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(k, wanted[:, :1], rtol=1e-5)


@pytest.mark.parametrize(("offset", "first"), [(0, 8), (1, 7)])
def test_factor_of_queries_grows_after_every_period(offset, first):
    positions = on_device.array([0, first - 1, first, first + 8, first + 16], jnp.int32)
    got = QueryScale(weight=0.5, period=8, offset=offset).factors(positions)
    np.testing.assert_allclose(got, 1 + 0.5 * np.log([1, 1, 2, 3, 4]), rtol=1e-6)


def test_projections_are_clipped_before_the_rotation():
    q, k, v = project(ClippedAttention(CONFIG, bound=1.5, dtype=jnp.float32))
    clipped = np.clip(X, -1.5, 1.5)
    np.testing.assert_allclose(q, turned(clipped.reshape(3, 2, 2)), rtol=1e-5)
    np.testing.assert_allclose(k, turned(clipped[:, None, :2]), rtol=1e-5)
    np.testing.assert_array_equal(v, clipped[:, None, :2])
