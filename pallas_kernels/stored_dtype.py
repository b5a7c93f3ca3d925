"""The dtypes of KV caches, and 16-bit floats that are stored as uint16.

XLA on the CPU copies a whole bfloat16 cache at each write, but not one of uint16. `kv_dtype` names
the float whose bits such a cache holds. Only the values that an op writes or reads are converted: a
bitcast of the whole array would be another copy.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.argument_checks import is_wide_float

BITS_DTYPE = jnp.dtype(jnp.uint16)
KV_DTYPES = ("float16", "bfloat16")  # the floats that a cache of uint16 may hold


def check_kv_dtype(op_name: str, cache_dtype: jnp.dtype, kv_dtype: jnp.dtype | None) -> None:
    """Checks that a cache holds floats of 16 bits or more, and that `kv_dtype` fits its dtype.

    Raises:
        ValueError: No op reads a cache of this dtype; the cache is uint16 and `kv_dtype` is not a
            16-bit float; or the cache is not uint16 and `kv_dtype` is given.
    """
    if cache_dtype == BITS_DTYPE:
        if kv_dtype is None or jnp.dtype(kv_dtype).name not in KV_DTYPES:
            raise ValueError(
                f"{op_name}: a uint16 kv_cache needs kv_dtype, the float whose bits it holds: got "
                f"{kv_dtype if kv_dtype is None else jnp.dtype(kv_dtype).name}, wanted one of "
                f"{sorted(KV_DTYPES)}."
            )
    elif kv_dtype is not None:
        raise ValueError(
            f"{op_name}: kv_dtype is only for a uint16 kv_cache: got {jnp.dtype(kv_dtype).name} "
            f"with a cache of {cache_dtype}. Leave it at None."
        )
    elif not is_wide_float(cache_dtype):
        raise ValueError(
            f"{op_name}: kv_cache has the wrong dtype: got {cache_dtype}, wanted a float of 16 "
            "bits or more, or uint16 with kv_dtype."
        )


def as_stored(
    x: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    cache_dtype: jnp.dtype,
    kv_dtype: jnp.dtype | None,
) -> jax.Array:  # cache_dtype[num_tokens, num_kv_heads, head_dim]
    """Converts new values to the numbers, or the bits, that the cache holds for them.

    Numbers beyond the range of a narrower dtype are clipped, because infinities make sums NaN.
    """
    value_dtype = cache_dtype if kv_dtype is None else kv_dtype
    largest = float(jnp.finfo(value_dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    x = x.astype(value_dtype)
    return x if kv_dtype is None else lax.bitcast_convert_type(x, cache_dtype)


def as_values(stored: jax.Array, kv_dtype: jnp.dtype | None) -> jax.Array:
    """Undoes the bitcast of `as_stored`."""
    return stored if kv_dtype is None else lax.bitcast_convert_type(stored, kv_dtype)
