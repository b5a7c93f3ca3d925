"""Root-mean-square normalisation over the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32.

    The normalised value is rounded to x's dtype before it is scaled, as Hugging Face does: in
    bfloat16 the order is visible.

    Source: arXiv:1910.07467.
    """

    def __init__(self, num_features: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))
        self.eps = eps

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        x_f32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True)
        normalised = x_f32 * jax.lax.rsqrt(mean_square + self.eps)
        return self.scale[...] * normalised.astype(x.dtype)
