"""`GatedRMSNorm`: a norm whose output is multiplied by gates that a small MLP computes from it."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.linear import Linear
from models.layers.rms_norm import RMSNorm


class GatedRMSNorm(nnx.Module):
    """Computes `y * sigmoid(fc2(silu(fc1(y))))` with `y = RMSNorm(x)`.

    The output of `fc1` has `rank` numbers per row.

    Source: arXiv:2505.06708 (gates), and A.X K2's release.
    """

    def __init__(self, num_features: int, *, rank: int, eps: float, dtype: jnp.dtype) -> None:
        self.norm = RMSNorm(num_features, eps=eps, dtype=dtype)
        self.fc1 = Linear(num_features, rank, dtype=dtype)
        self.fc2 = Linear(rank, num_features, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, num_features]
    ) -> jax.Array:  # f[num_rows, num_features]
        y = self.norm(x)
        inner = jax.nn.silu(self.fc1.product(y).astype(x.dtype))
        factors = self.fc2.product(inner).astype(x.dtype)
        return (y * jax.nn.sigmoid(factors.astype(jnp.float32))).astype(x.dtype)
