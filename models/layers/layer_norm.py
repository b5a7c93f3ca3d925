"""Layer normalization: over the last axis, and over each head with a scale of its own."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.weight_rule import Source, WeightRule
from pallas_kernels.row_reductions import platform_sum_of_rows


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(variance(x) + eps) * scale + bias`.

    All of it is computed in float32 and rounded to x's dtype once, as PyTorch does.

    Source: arXiv:1607.06450.
    """

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))
        self.bias = nnx.Param(jnp.zeros((num_features,), dtype))
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return _vector_rules(name, {"scale": ("weight", self.scale), "bias": ("bias", self.bias)})

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        scale, bias = (param[...].astype(jnp.float32) for param in (self.scale, self.bias))
        return (_normalize(x, self.eps) * scale + bias).astype(x.dtype)


class OffsetLayerNorm(nnx.Module):
    """`LayerNorm` whose scale is 1 + `offset` (Nemotron)."""

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.offset = nnx.Param(jnp.zeros((num_features,), dtype))
        self.bias = nnx.Param(jnp.zeros((num_features,), dtype))
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return _vector_rules(name, {"offset": ("weight", self.offset), "bias": ("bias", self.bias)})

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        # transformers rounds the sum to the dtype of the weights.
        scale, bias = ((1 + self.offset[...]), self.bias[...])
        normed = _normalize(x, self.eps) * scale.astype(jnp.float32)
        return (normed + bias.astype(jnp.float32)).astype(x.dtype)


class UnbiasedLayerNorm(nnx.Module):
    """`LayerNorm` without a bias."""

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return _vector_rules(name, {"scale": ("weight", self.scale)})

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return (_normalize(x, self.eps) * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class UnscaledLayerNorm(nnx.Module):
    """`LayerNorm` without parameters."""

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return _normalize(x, self.eps).astype(x.dtype)


class HeadLayerNorm(nnx.Module):
    """Layer normalization of each head, with one scale per head and no bias.

    A checkpoint stores one tensor per head, "norms.0.weight" and so on. The scales of all heads are
    one vector here, because a loop over layers copies vectors only.
    """

    def __init__(self, num_heads: int, head_dim: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_heads * head_dim,), dtype))
        self.head_dim = head_dim
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        num_heads = self.scale.get_value().shape[0] // self.head_dim
        sources = tuple(
            Source(name=f"{name}.norms.{head_idx}.weight", shape=(self.head_dim,))
            for head_idx in range(num_heads)
        )
        rule = WeightRule(sources=sources, layout="vector", axes=("heads",), combine=np.concatenate)
        return {"scale": rule}

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_heads, head_dim]
    ) -> jax.Array:  # f[num_tokens, num_heads, head_dim]
        scale = self.scale[...].astype(jnp.float32).reshape(-1, self.head_dim)
        return (_normalize(x, self.eps) * scale).astype(x.dtype)


class StackedHeadLayerNorm(HeadLayerNorm):
    """`HeadLayerNorm` of checkpoints that store the scales of all heads in one tensor (Cohere)."""

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        num_heads = self.scale.get_value().shape[0] // self.head_dim
        source = Source(name=f"{name}.weight", shape=(num_heads, self.head_dim))
        rule = WeightRule(
            sources=(source,),
            layout="vector",
            axes=("heads",),
            combine=lambda arrays: arrays[0].reshape(-1),
        )
        return {"scale": rule}


def _vector_rules(
    name: str,
    params: Mapping[str, tuple[str, nnx.Param]],  # attribute -> name in the checkpoint, parameter
) -> dict[str, WeightRule]:
    return {
        leaf: WeightRule(
            sources=(Source(name=f"{name}.{stored}", shape=param.get_value().shape),),
            layout="vector",
            axes=(None,),
        )
        for leaf, (stored, param) in params.items()
    }


def _normalize(x: jax.Array, eps: float) -> jax.Array:  # f32[..., num_features]
    x_f32 = x.astype(jnp.float32)
    centered = x_f32 - _mean(x_f32)
    return centered * jax.lax.rsqrt(_mean(centered * centered) + eps)


def _mean(x: jax.Array) -> jax.Array:  # f32[..., num_features] -> f32[..., 1]
    return platform_sum_of_rows(x)[..., None] / x.shape[-1]
