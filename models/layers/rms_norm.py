"""Root-mean-square normalization over the last axis, in the forms that checkpoints have."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.weight_rule import Source, WeightRule
from pallas_kernels.row_reductions import platform_sum_of_rows


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32.

    The normalized value is rounded to x's dtype before it is scaled, as Hugging Face does: in
    bfloat16 the order is visible.

    Source: arXiv:1910.07467.
    """

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return {"scale": _vector_rule(name, self.scale)}

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return self.scale[...] * _normalize(x, self.eps).astype(x.dtype)


class OffsetRMSNorm(nnx.Module):
    """Gemma's form: `x / sqrt(mean(x^2) + eps) * (1 + offset)`, rounded to x's dtype at the end."""

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.offset = nnx.Param(jnp.zeros((num_features,), dtype))
        self.eps = eps

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return {"offset": _vector_rule(name, self.offset)}

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return self.normed(x, self.offset[...])

    def normed(self, x: jax.Array, offset: jax.Array) -> jax.Array:
        """The norm of x with these offsets, which may have several axes."""
        # In bfloat16, 1 + 0.003 would be 1: the sum is float32 too.
        return (_normalize(x, self.eps) * (1.0 + offset.astype(jnp.float32))).astype(x.dtype)


class RoundedLastRMSNorm(RMSNorm):
    """Gemma 4's form: scaled in float32 too, and rounded to x's dtype at the end."""

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        scale = self.scale[...].astype(jnp.float32)
        return (_normalize(x, self.eps) * scale).astype(x.dtype)


class RoundedInputRMSNorm(RMSNorm):
    """`RMSNorm` of x rounded to the dtype of the scale, for a float32 residual stream (Mamba)."""

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return super().__call__(x.astype(self.scale[...].dtype))


class JoinedHeadsRMSNorm(RMSNorm):
    """`RMSNorm` of all heads of a token together, as if they were one vector (OLMoE, MiniMax-M2).

    There is a scale for each feature of each head.
    """

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return {"scale": dataclasses.replace(_vector_rule(name, self.scale), axes=("heads",))}

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_heads, head_dim]
    ) -> jax.Array:  # f[num_tokens, num_heads, head_dim]
        return super().__call__(x.reshape(x.shape[0], -1)).reshape(x.shape)


class RoundedLastJoinedHeadsRMSNorm(JoinedHeadsRMSNorm, RoundedLastRMSNorm):
    """`RoundedLastRMSNorm` of all heads of a token together (OLMo 2)."""


class UnscaledRMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps)`, computed in float32: a norm without parameters."""

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return _normalize(x, self.eps).astype(x.dtype)


def _vector_rule(name: str, param: nnx.Param) -> WeightRule:
    weight = Source(name=f"{name}.weight", shape=param.get_value().shape)
    return WeightRule(sources=(weight,), layout="vector", axes=(None,))


def _normalize(x: jax.Array, eps: float) -> jax.Array:  # f32[..., num_features]
    x_f32 = x.astype(jnp.float32)
    sum_of_squares = platform_sum_of_rows(x_f32 * x_f32)
    return x_f32 * jax.lax.rsqrt(sum_of_squares[..., None] / x.shape[-1] + eps)
