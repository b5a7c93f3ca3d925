"""Simple Pallas body of `slot_mapping`, one grid step a token. Runs in interpret mode only."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def _token_kernel(
    positions_ref: jax.Array,  # i32[num_groups, num_tokens]
    block_tables_ref: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc_ref: jax.Array,  # i32[num_reqs + 1]
    slots_ref: jax.Array,  # i32[num_groups, num_tokens]
    *,
    block_size: int,
    pad_slot: int,
    cp_world_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> None:
    num_groups, num_reqs, max_blocks_per_req = block_tables_ref.shape
    token_idx = pl.program_id(0)

    def count_ended(req_idx: jax.Array, num_ended: jax.Array) -> jax.Array:
        return num_ended + (query_start_loc_ref[req_idx + 1] <= token_idx).astype(jnp.int32)

    req_idx = lax.fori_loop(0, num_reqs, count_ended, jnp.int32(0))
    readable_req = jnp.minimum(req_idx, num_reqs - 1)
    for group_idx in range(num_groups):
        position = positions_ref[group_idx, token_idx]
        stripe_idx = position // cp_interleave
        own_position = stripe_idx // cp_world_size * cp_interleave + position % cp_interleave
        logical_block = jnp.clip(own_position // block_size, 0, max_blocks_per_req - 1)
        block_id = block_tables_ref[group_idx, readable_req, logical_block]
        slot = block_id * block_size + own_position % block_size
        is_written = (req_idx < num_reqs) & (stripe_idx % cp_world_size == cp_rank)
        slots_ref[group_idx, token_idx] = jnp.where(is_written, slot, pad_slot)


def slot_mapping_pallas(
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
    return pl.pallas_call(
        functools.partial(
            _token_kernel,
            block_size=block_size,
            pad_slot=pad_slot,
            cp_world_size=cp_world_size,
            cp_rank=cp_rank,
            cp_interleave=cp_interleave,
        ),
        out_shape=jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        grid=(positions.shape[1],),
        interpret=True,
        name="slot_mapping",
    )(positions, block_tables, query_start_loc)
