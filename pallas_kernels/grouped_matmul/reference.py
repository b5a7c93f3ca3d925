"""The definition of `grouped_matmul`, kept short: it copies the matrix of every tile."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values


def grouped_matmul_reference(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    weights: jax.Array,  # f or u16[num_groups, in_features, out_features]
    tile_groups: jax.Array,  # i32[num_tiles]
    tile_sizes: jax.Array,  # i32[num_tiles]
    *,
    weights_dtype: jnp.dtype | None,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `api.grouped_matmul`."""
    tiles = x.reshape(tile_groups.shape[0], -1, x.shape[1])
    own = as_values(weights.at[tile_groups].get(mode="clip"), weights_dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "tri,tio->tro", tiles, own, precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(x.shape[0], -1).astype(x.dtype)
