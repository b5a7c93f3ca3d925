"""Fast plain-JAX body of `slot_mapping`: finds requests by comparison, and blocks by one gather."""

import jax
import jax.numpy as jnp


def slot_mapping_xla(
    positions: jax.Array,  # i32[num_groups, num_tokens]
    block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    block_size: int,
    pad_slot: int,
    cp_world_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """See `api.slot_mapping`."""
    num_groups, num_tokens = positions.shape
    _, num_reqs, max_blocks_per_req = block_tables.shape
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    # "compare_all" is one fused sum. A binary search would need about log2(num_reqs) gathers in
    # sequence, each in its own kernel.
    req_idx = jnp.searchsorted(
        query_start_loc[1:], token_idx, side="right", method="compare_all"
    ).astype(jnp.int32)  # i32[num_tokens], num_reqs for padding
    is_padding = req_idx == num_reqs

    # Divisions by constants; with one rank the offset is the position's place in its block.
    # Unsigned, because no token's position is negative, and signed division adds kernels.
    virtual_block_size = block_size * cp_world_size
    place = positions.astype(jnp.uint32)
    virtual_offset = place % virtual_block_size
    offset = virtual_offset // (cp_world_size * cp_interleave) * cp_interleave
    offset += virtual_offset % cp_interleave
    is_here = virtual_offset // cp_interleave % cp_world_size == cp_rank

    # One flat gather. Clipped, because padding may hold anything.
    logical_block = jnp.minimum(place // virtual_block_size, max_blocks_per_req - 1)
    table_row = jnp.arange(num_groups, dtype=jnp.int32)[:, None] * num_reqs + jnp.minimum(
        req_idx, num_reqs - 1
    )  # i32[num_groups, num_tokens]
    entry = table_row * max_blocks_per_req + logical_block.astype(jnp.int32)
    block_id = (
        block_tables.reshape(-1)
        .at[entry]
        .get(mode="promise_in_bounds", wrap_negative_indices=False)
    )
    slots = block_id * block_size + offset.astype(jnp.int32)
    return jnp.where(is_padding | ~is_here, jnp.int32(pad_slot), slots)
