"""Reference body of `slot_mapping`: compares every token with every request's end."""

import jax
import jax.numpy as jnp


def slot_mapping_reference(
    positions: jax.Array,  # i32[num_groups, num_tokens]
    block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    block_size: int,
    pad_slot: int,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """See `api.slot_mapping`."""
    num_tokens = positions.shape[1]
    _, num_reqs, max_blocks_per_req = block_tables.shape
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)  # i32[num_tokens]
    # A token belongs to the first request that ends after it: query_start_loc [0, 2, 2, 5] ->
    # request of each token [0, 0, 2, 2, 2], then 3 (padding).
    has_ended = query_start_loc[None, 1:] <= token_idx[:, None]  # bool[num_tokens, num_reqs]
    req_idx = jnp.sum(has_ended, axis=1, dtype=jnp.int32)  # i32[num_tokens]
    is_padding = req_idx == num_reqs  # bool[num_tokens]

    readable_req = jnp.where(is_padding, 0, req_idx)
    logical_block = jnp.clip(positions // block_size, 0, max_blocks_per_req - 1)
    group_idx = jnp.arange(positions.shape[0])[:, None]
    block_id = block_tables[group_idx, readable_req[None, :], logical_block]
    slots = block_id * block_size + positions % block_size
    return jnp.where(is_padding[None, :], pad_slot, slots)
