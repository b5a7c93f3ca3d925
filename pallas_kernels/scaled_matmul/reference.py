"""The definition of `scaled_matmul`, kept short: it widens the whole matrix to float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.number_format import NumberFormat

# The magnitudes of e2m1 by their three bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scaled_matmul_reference(
    x: jax.Array,  # f[num_rows, in_features]
    numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, out_features]
    scales: jax.Array,  # f32 or u8[num_groups, out_features]
    zeros: jax.Array | None,  # u8[num_groups, out_features]
    *,
    number_format: NumberFormat,
) -> jax.Array:  # f32[num_rows, out_features]
    """See `api.scaled_matmul`."""
    weights = _values_of(numbers, number_format)
    if number_format == "int4":
        weights -= 8.0 if zeros is None else zeros.astype(jnp.float32)[:, None]
    if scales.dtype == jnp.uint8:
        scales = jnp.exp2(scales.astype(jnp.float32) - 127)
    weights = (weights * scales[:, None]).reshape(x.shape[1], -1)
    return jnp.dot(x.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)


def _values_of(
    numbers: jax.Array, number_format: NumberFormat
) -> jax.Array:  # f32[num_groups, group_size, out_features]
    if number_format == "int8":
        return numbers.astype(jnp.float32)
    if number_format == "e4m3":
        return lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).astype(jnp.float32)
    codes = jnp.concatenate([numbers % 16, numbers // 16], axis=1)
    if number_format == "int4":
        return codes.astype(jnp.float32)
    return jnp.where(codes < 8, 1.0, -1.0) * jnp.array(_E2M1)[codes % 8]
