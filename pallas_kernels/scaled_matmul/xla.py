"""XLA body of `scaled_matmul`: widens the matrix in x's dtype, and multiplies with it."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.number_format import NumberFormat, widen_groups


def scaled_matmul_xla(
    x: jax.Array,  # f[num_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_groups, out_features]
    *,
    number_format: NumberFormat,
) -> jax.Array:  # f32[num_rows, out_features]
    """See `api.scaled_matmul`. XLA writes the widened matrix to memory and reads it again."""
    weights = widen_groups(numbers, scales, zeros, number_format, x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, weights, precision=precision, preferred_element_type=jnp.float32)
