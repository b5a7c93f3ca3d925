"""A KV cache of 8-bit numbers: one scale a KV head, for keys and for values.

A stored number q stands for `q * scale`. Writing divides by the scale, clips to what the dtype
holds (int8: -127 to 127, rounded to the nearest; float8_e4m3fn: -448 to 448) and casts. The caller
chooses the scales once, before the first write: they belong to the model, not to a step.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_float, require_shape

# dtype -> the largest magnitude that is stored.
LARGEST_STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a cache of this dtype needs scales."""
    return jnp.dtype(dtype).name in LARGEST_STORED


def quantize(
    x: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    scale: jax.Array | None,  # f32[num_kv_heads]
    dtype: jnp.dtype,
) -> jax.Array:  # dtype[num_tokens, num_kv_heads, head_dim]
    """What a cache of `dtype` stores for `x`; a cast where it is not quantized.

    Numbers beyond those of a narrower dtype become its largest: infinite ones would be NaN in sums.
    """
    if not is_quantized(dtype):
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
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    **scales: jax.Array | None,  # f32[num_kv_heads] by the argument's name, one per part of a block
) -> None:
    """Checks that a quantized cache, and no other, has all its scales.

    Raises:
        ValueError: One is missing, or given and not needed, or has the wrong shape or dtype.
    """
    num_kv_heads = kv_cache.shape[2]
    for arg_name, scale in scales.items():
        if not is_quantized(kv_cache.dtype):
            if scale is not None:
                raise ValueError(
                    f"{op_name}: {arg_name} belongs to a quantized cache: got one with a cache of "
                    f"{kv_cache.dtype}, wanted None or a cache of {sorted(LARGEST_STORED)}."
                )
            continue
        if scale is None:
            raise ValueError(
                f"{op_name}: a cache of {kv_cache.dtype} needs {arg_name}: got None, "
                f"wanted f32[{num_kv_heads}], one per KV head."
            )
        require_shape(op_name, arg_name, scale, (num_kv_heads,))
        require_float(op_name, **{arg_name: scale})
