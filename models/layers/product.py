"""Products of activations and kernels: float32 sums, and kernels of fewer bits."""

import jax
import jax.numpy as jnp
from jax import lax

INT8_MAX = 127
# XLA:CPU takes ten times as long to multiply 7 rows of bfloat16 or int8 as to multiply 8.
MIN_ROUNDED_ROWS = 8


def rounded(
    x: jax.Array,  # f[num_tokens, in_features]
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:  # dtype[num_rows, in_features], f32[num_tokens]
    """Rounds x to the dtype of a kernel with fewer bits, and adds rows up to `MIN_ROUNDED_ROWS`.

    In int8, each token is rounded to 255 steps of its own largest number. The second result holds
    these steps; it is None for every other dtype.
    """
    if x.dtype == dtype:
        return x, None
    if dtype == jnp.int8:
        x_q, x_scale = round_to_int8(x, axis=1)
        return _at_least_min_rows(x_q), x_scale
    return _at_least_min_rows(x.astype(dtype)), None


def dot(
    x: jax.Array,  # [num_rows, in_features], of the kernel's dtype
    kernel: jax.Array,  # f[in_features, out_features], or i8[out_features, in_features]
) -> jax.Array:  # f32 or i32[num_rows, out_features]
    """`x @ kernel` with wide sums."""
    return dot_int32(x, kernel) if kernel.dtype == jnp.int8 else dot_float32(x, kernel)


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


def dot_int32(
    x: jax.Array,  # i8[num_tokens, in_features]
    kernel: jax.Array,  # i8[out_features, in_features]
) -> jax.Array:  # i32[num_tokens, out_features]
    """Multiplies in integers.

    Both operands are contiguous along the summed axis, which int8 instructions need. With
    [in, out] YNNPACK reorders the kernel and sums its columns at each call: products of 512 by
    1,536 take 1.2 to 1.3 times as long with 8 rows, 1.1 with 64, and about as long with 256 (one
    core with AVX-512 VNNI, JAX 0.12.0.1).
    """
    return lax.dot_general(
        x,
        kernel,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )


def round_to_int8(
    x: jax.Array,  # f[...]
    *,
    axis: int,
) -> tuple[jax.Array, jax.Array]:  # i8[...], f32[... without axis]
    """The nearest of 255 equal steps between the largest number along `axis` and its negative."""
    scale = jnp.abs(x).max(axis=axis).astype(jnp.float32) / INT8_MAX
    step = jnp.expand_dims(jnp.where(scale > 0, scale, 1.0), axis)
    return jnp.round(x.astype(jnp.float32) / step).astype(jnp.int8), scale


def _at_least_min_rows(x: jax.Array) -> jax.Array:  # [num_tokens, in] -> [>= num_tokens, in]
    return jnp.pad(x, ((0, max(0, MIN_ROUNDED_ROWS - x.shape[0])), (0, 0)))
