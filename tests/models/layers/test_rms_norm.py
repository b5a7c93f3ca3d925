"""RMSNorm in float32 and bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np

from models.layers.rms_norm import (
    JoinedHeadsRMSNorm,
    OffsetRMSNorm,
    RMSNorm,
    RoundedLastJoinedHeadsRMSNorm,
    RoundedLastRMSNorm,
    UnscaledRMSNorm,
)
from tests import on_device


def test_norm_by_hand():
    norm = RMSNorm(2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 10.0])
    # Root mean square of (3, 4) is sqrt(12.5).
    np.testing.assert_allclose(
        norm(on_device.array([[3.0, 4.0]])), [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6
    )


def test_eps_keeps_zero_at_zero():
    assert RMSNorm(3, eps=1e-6, dtype=jnp.float32)(on_device.zeros((1, 3))).tolist() == [[0.0] * 3]


def test_bfloat16_is_normed_in_float32_and_returned_as_bfloat16():
    # 1024 squares of 100 overflow no float32, and bfloat16 sums would stop growing early.
    x = on_device.full((1, 1024), 100.0, jnp.bfloat16)
    out = jax.device_get(jax.jit(RMSNorm(1024, eps=1e-6, dtype=jnp.bfloat16))(x))
    assert out.dtype == jnp.bfloat16
    assert out.astype(np.float32).tolist() == [[1.0] * 1024]


def test_offset_is_added_to_one():
    norm = OffsetRMSNorm(2, eps=0.0, dtype=jnp.float32)
    norm.offset[...] = on_device.array([0.0, 9.0])
    np.testing.assert_allclose(
        norm(on_device.array([[3.0, 4.0]])), [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6
    )


def test_bfloat16_offset_is_added_in_float32_and_rounded_once():
    norm = OffsetRMSNorm(2, eps=0.0, dtype=jnp.bfloat16)
    norm.offset[...] = on_device.full(2, 1 / 512, jnp.bfloat16)
    out = norm(on_device.array([[3.0, 4.0]], jnp.bfloat16))
    # 3 / sqrt(12.5) * (1 + 1/512) is 217.6 steps of 1/256. With 1 + 1/512 rounded to 1, or with
    # 3 / sqrt(12.5) rounded first, it would be 217.2 or 217.4.
    assert float(out[0, 0]) == 218 / 256


def test_bfloat16_scale_is_multiplied_in_float32_and_rounded_once():
    norm = RoundedLastRMSNorm(2, eps=0.0, dtype=jnp.bfloat16)
    norm.scale[...] = on_device.full(2, 1 + 1 / 64, jnp.bfloat16)
    out = norm(on_device.array([[3.0, 4.0]], jnp.bfloat16))
    # 3 / sqrt(12.5) * (1 + 1/64) is 220.6 steps of 1/256. With 3 / sqrt(12.5) rounded to 217 of
    # them first, it would be 220.4.
    assert float(out[0, 0]) == 221 / 256


def test_norm_without_parameters():
    norm = UnscaledRMSNorm(eps=0.0)
    np.testing.assert_allclose(
        norm(on_device.array([[3.0, 4.0]])), [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6
    )
    assert norm(on_device.ones((1, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_heads_are_normed_together():
    norm = JoinedHeadsRMSNorm(4, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 10.0, 1.0, 2.0])
    # Root mean square of (1, 7, 1, 7) is 5.
    x = on_device.array([[[1.0, 7.0], [1.0, 7.0]]])
    np.testing.assert_allclose(norm(x), [[[0.2, 14.0], [0.2, 2.8]]], rtol=1e-6)
    assert norm.weight_rules("q_norm")["scale"].axes == ("heads",)


def test_heads_that_are_normed_together_may_be_scaled_before_they_are_rounded():
    norm = RoundedLastJoinedHeadsRMSNorm(2, eps=0.0, dtype=jnp.bfloat16)
    norm.scale[...] = on_device.full(2, 1 + 1 / 64, jnp.bfloat16)
    out = norm(on_device.array([[[3.0], [4.0]]], jnp.bfloat16))
    # As in `test_bfloat16_scale_is_multiplied_in_float32_and_rounded_once`.
    assert float(out[0, 0, 0]) == 221 / 256
    assert norm.weight_rules("q_norm")["scale"].axes == ("heads",)
