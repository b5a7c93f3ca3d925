"""Layer norms over the hidden size and over each head."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.layer_norm import (
    HeadLayerNorm,
    LayerNorm,
    OffsetLayerNorm,
    StackedHeadLayerNorm,
    UnbiasedLayerNorm,
    UnscaledLayerNorm,
)
from tests import on_device


def test_norm_by_hand():
    norm = LayerNorm(2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 10.0])
    norm.bias[...] = on_device.array([0.5, 2.0])
    # (3, 7) has mean 5 and standard deviation 2, so it becomes (-1, 1).
    np.testing.assert_allclose(norm(on_device.array([[3.0, 7.0]])), [[-0.5, 12.0]], rtol=1e-6)


def test_eps_keeps_equal_numbers_at_the_bias():
    norm = LayerNorm(3, eps=1e-5, dtype=jnp.float32)
    norm.bias[...] = on_device.array([1.0, 2.0, 3.0])
    assert norm(on_device.full((1, 3), 7.0)).tolist() == [[1.0, 2.0, 3.0]]


def test_a_large_mean_does_not_cancel_the_variance():
    # The mean of squares less the square of the mean would be 0 in float32.
    norm = LayerNorm(2, eps=0.0, dtype=jnp.float32)
    np.testing.assert_allclose(norm(on_device.array([[9999.0, 10001.0]])), [[-1.0, 1.0]], rtol=1e-6)


def test_bfloat16_is_scaled_and_shifted_in_float32_and_rounded_once():
    norm = LayerNorm(2, eps=0.0, dtype=jnp.bfloat16)
    norm.scale[...] = on_device.full(2, 1 + 1 / 128, jnp.bfloat16)
    norm.bias[...] = on_device.full(2, 1 / 256 + 1 / 32768, jnp.bfloat16)
    out = norm(on_device.array([[3.0, 7.0]], jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    # 1 + 1/128 + 1/256 lies between two numbers of bfloat16; the 1/32768 decides.
    assert float(out[0, 1]) == 1 + 2 / 128


def test_each_head_has_its_own_mean_and_scale():
    norm = HeadLayerNorm(2, 2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 1.0, 10.0, 20.0])
    x = on_device.array([[[3.0, 7.0], [100.0, 102.0]]])
    np.testing.assert_allclose(norm(x), [[[-1.0, 1.0], [-10.0, 20.0]]], rtol=1e-6)


def test_scales_of_heads_are_joined_and_split_over_devices_by_head():
    rule = HeadLayerNorm(3, 2, eps=0.0, dtype=jnp.float32).weight_rules("q_layernorm")["scale"]
    names = [f"q_layernorm.norms.{head_idx}.weight" for head_idx in range(3)]
    assert [source.name for source in rule.sources] == names
    assert {source.shape for source in rule.sources} == {(2,)}
    assert rule.axes == ("heads",)
    stored = [np.full(2, head_idx) for head_idx in range(3)]
    assert rule.combined(stored).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_features", [20, 64])
def test_norm_equals_live_torch(num_features):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((3, num_features), np.float32)
    norm = LayerNorm(num_features, eps=1e-5, dtype=jnp.float32)
    norm.scale[...], norm.bias[...] = scale, bias
    wanted = torch.nn.functional.layer_norm(
        torch.from_numpy(x),
        (num_features,),
        torch.from_numpy(scale),
        torch.from_numpy(bias),
        eps=1e-5,
    )
    np.testing.assert_allclose(norm(x), wanted.numpy(), atol=2e-6)


def test_offset_is_added_to_one():
    norm = OffsetLayerNorm(2, eps=0.0, dtype=jnp.float32)
    norm.offset[...] = on_device.array([0.0, 9.0])
    norm.bias[...] = on_device.array([0.5, 2.0])
    np.testing.assert_allclose(norm(on_device.array([[3.0, 7.0]])), [[-0.5, 12.0]], rtol=1e-6)
    names = {leaf: rule.sources[0].name for leaf, rule in norm.weight_rules("norm").items()}
    assert names == {"offset": "norm.weight", "bias": "norm.bias"}


def test_norms_without_a_bias_or_any_parameter():
    norm = UnbiasedLayerNorm(2, eps=0.0, dtype=jnp.float32)
    norm.scale[...] = on_device.array([1.0, 10.0])
    np.testing.assert_allclose(norm(on_device.array([[3.0, 7.0]])), [[-1.0, 10.0]], rtol=1e-6)
    plain = UnscaledLayerNorm(eps=0.0)
    np.testing.assert_allclose(plain(on_device.array([[3.0, 7.0]])), [[-1.0, 1.0]], rtol=1e-6)
    assert plain(on_device.ones((1, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_scales_of_heads_may_be_stored_in_one_tensor():
    rule = StackedHeadLayerNorm(3, 2, eps=0.0, dtype=jnp.float32).weight_rules("q_norm")["scale"]
    (source,) = rule.sources
    assert (source.name, source.shape) == ("q_norm.weight", (3, 2))
    assert rule.combined([np.arange(6).reshape(3, 2)]).tolist() == [0, 1, 2, 3, 4, 5]
    assert rule.axes == ("heads",)
