"""Fast plain-JAX body of `slot_mapping`: a binary search for each token, and one gather."""

import jax
import jax.numpy as jnp


def slot_mapping_xla(
    positions: jax.Array,  # i32[num_groups, num_tokens]
    block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    block_size: int,
    pad_slot: int,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """See `api.slot_mapping`."""
    num_groups, num_tokens = positions.shape
    _, num_reqs, max_blocks_per_req = block_tables.shape
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    # Unrolled: about log2(num_reqs) gathers, where a loop would launch each of them on its own.
    req_idx = jnp.searchsorted(
        query_start_loc[1:], token_idx, side="right", method="scan_unrolled"
    ).astype(jnp.int32)  # i32[num_tokens], num_reqs for padding
    is_padding = req_idx == num_reqs

    # One flat gather. Clipped, because padding holds anything and a negative index would wrap.
    logical_block = jnp.clip(positions // block_size, 0, max_blocks_per_req - 1)
    table_row = jnp.arange(num_groups, dtype=jnp.int32)[:, None] * num_reqs + jnp.minimum(
        req_idx, num_reqs - 1
    )  # i32[num_groups, num_tokens]
    block_id = block_tables.reshape(-1)[table_row * max_blocks_per_req + logical_block]
    slots = block_id * block_size + positions % block_size
    return jnp.where(is_padding, jnp.int32(pad_slot), slots)
