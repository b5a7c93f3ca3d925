"""Products of floats with float32 sums."""

import jax
import jax.numpy as jnp
from jax import lax

# XLA:CPU multiplies fewer rows of bfloat16 or int8 much more slowly (docs/design/cpu.md).
MIN_ROUNDED_ROWS = 8


def dot_float32(
    x: jax.Array,  # f[num_tokens, in_features]
    kernel: jax.Array,  # f[in_features, out_features], same dtype as x
) -> jax.Array:  # f32[num_tokens, out_features]
    """Multiplies with float32 sums.

    Float32 inputs are multiplied as such: a GPU would otherwise round them to TF32 and lose 13 of
    23 bits. 16-bit inputs are exact in the product and need only the wide sum.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, kernel, precision=precision, preferred_element_type=jnp.float32)


def at_least_min_rows(x: jax.Array) -> jax.Array:  # [num_tokens, in] -> [>= num_tokens, in]
    """Adds rows of zeros up to `MIN_ROUNDED_ROWS`, for x that was rounded to fewer bits."""
    return jnp.pad(x, ((0, max(0, MIN_ROUNDED_ROWS - x.shape[0])), (0, 0)))
