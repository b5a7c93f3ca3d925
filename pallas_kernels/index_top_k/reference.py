"""Reference body of `index_top_k`: every token against its whole block table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import as_values


def index_top_k_reference(
    q: jax.Array,  # f[num_tokens, num_heads, key_dim]
    weights: jax.Array,  # f32[num_tokens, num_heads]
    key_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    top_k: int,
    key_step: int,
    kv_dtype: jnp.dtype | None,
    batch_invariant: bool,
    no_position: int,
) -> jax.Array:  # i32[num_tokens, top_k]
    """See `api.index_top_k`."""
    del batch_invariant  # every token is computed alike
    num_tokens, _, key_dim = q.shape
    num_blocks, width = key_cache.shape[1], key_cache.shape[-1]
    num_reqs = block_tables.shape[0]

    # query_start_loc [0, 2, 2, 5] -> request of each token [0, 0, 2, 2, 2], then 3 (padding).
    token_idx = jnp.arange(num_tokens)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1)
    is_used = req_idx < num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)
    is_used &= seq_lens[req_idx] > 0
    position = seq_lens[req_idx] - (query_start_loc[req_idx + 1] - token_idx)

    # f32[num_tokens, max_len, key_dim]: each token's own copy of the keys of its sequence.
    tables = jnp.clip(block_tables[req_idx], 0, num_blocks - 1)
    keys = as_values(key_cache[row, :, 0], kv_dtype)[tables].reshape(num_tokens, -1, width)
    keys = keys[..., :key_dim].astype(jnp.float32)
    products = jnp.einsum(
        "thd,tkd->thk", q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST
    )
    scores = (weights[:, :, None] * jnp.maximum(products, 0)).sum(axis=1)
    key_position = jnp.arange(scores.shape[1], dtype=jnp.int32)
    is_seen = is_used[:, None] & (key_position <= position[:, None])
    is_seen &= key_position % key_step == key_step - 1
    # A sort by descending score, then by position. Zeros are equal whatever their signs.
    sortable = jnp.where(is_seen, jnp.where(scores == 0, 0.0, -scores), jnp.inf)
    positions = jnp.where(is_seen, key_position, no_position)
    _, positions = lax.sort((sortable, positions), dimension=1, num_keys=2)
    missing = max(top_k - positions.shape[1], 0)
    return jnp.pad(positions, ((0, 0), (0, missing)), constant_values=no_position)[:, :top_k]
