"""A KV cache of 8-bit numbers: one scale a KV head, for keys and for values.

A stored number q stands for `q * scale`. Writing divides by the scale, clips to what the dtype
holds (int8: -127 to 127, rounded to the nearest; float8_e4m3fn: -448 to 448) and casts. The caller
chooses the scales once, before the first write: they belong to the model, not to a step.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import is_wide_float, require_float, require_shape

# dtype -> the largest magnitude that is stored.
LARGEST_STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantised(dtype: jnp.dtype) -> bool:
    """Whether a cache of this dtype needs scales."""
    return jnp.dtype(dtype).name in LARGEST_STORED


def quantise(
    x: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    scale: jax.Array | None,  # f32[num_kv_heads]
    dtype: jnp.dtype,
) -> jax.Array:  # dtype[num_tokens, num_kv_heads, head_dim]
    """What a cache of `dtype` stores for `x`; a cast where it is not quantised.

    Numbers beyond those of a narrower dtype become its largest: infinite ones would be NaN in sums.
    """
    if not is_quantised(dtype):
        largest = float(jnp.finfo(dtype).max)
        if largest < float(jnp.finfo(x.dtype).max):
            x = jnp.clip(x.astype(jnp.float32), -largest, largest)
        return x.astype(dtype)
    largest = LARGEST_STORED[jnp.dtype(dtype).name]
    scaled = jnp.clip(x.astype(jnp.float32) / scale[:, None], -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)  # a cast cuts off
    return scaled.astype(dtype)


def check_scales(
    op_name: str,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_scale: jax.Array | None,  # f32[num_kv_heads]
    v_scale: jax.Array | None,  # f32[num_kv_heads]
) -> None:
    """Checks the caches' dtypes, and that each quantised cache, and no other, has its scales.

    Raises:
        ValueError: It has none, or has some and needs none, or they have the wrong shape.
    """
    for arg_name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        if not is_quantised(cache.dtype):
            if not is_wide_float(cache.dtype):
                raise ValueError(
                    f"{op_name}: {arg_name}_cache has the wrong dtype: got {cache.dtype}, wanted a "
                    f"float of 16 bits or more, or one of {sorted(LARGEST_STORED)}."
                )
            if scale is not None:
                raise ValueError(
                    f"{op_name}: {arg_name}_scale belongs to a quantised cache: got one beside a "
                    f"cache of {cache.dtype}, wanted None or a cache of {sorted(LARGEST_STORED)}."
                )
            continue
        if scale is None:
            raise ValueError(
                f"{op_name}: a cache of {cache.dtype} needs {arg_name}_scale: got None, "
                f"wanted f32[{cache.shape[2]}], one per KV head."
            )
        require_shape(op_name, f"{arg_name}_scale", scale, (cache.shape[2],))
        require_float(op_name, **{f"{arg_name}_scale": scale})
