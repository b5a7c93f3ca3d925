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

    # Unsigned, because no token's position is negative, and signed division adds kernels.
    place = positions.astype(jnp.uint32)
    offset = (place % block_size).astype(jnp.int32)

    # One flat gather. Clipped, because padding may hold anything.
    logical_block = jnp.minimum(place // block_size, max_blocks_per_req - 1)
    table_row = jnp.arange(num_groups, dtype=jnp.int32)[:, None] * num_reqs + jnp.minimum(
        req_idx, num_reqs - 1
    )  # i32[num_groups, num_tokens]
    entry = table_row * max_blocks_per_req + logical_block.astype(jnp.int32)
    block_id = (
        block_tables.reshape(-1)
        .at[entry]
        .get(mode="promise_in_bounds", wrap_negative_indices=False)
    )
    return jnp.where(is_padding, jnp.int32(pad_slot), block_id * block_size + offset)
