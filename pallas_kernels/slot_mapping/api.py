"""Public op `slot_mapping`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_at_least, require_int32, require_shape
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.slot_mapping.reference import slot_mapping_reference
from pallas_kernels.slot_mapping.xla import slot_mapping_xla
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": slot_mapping_reference,
    "xla": slot_mapping_xla,
    **mosaic_bodies("pallas_kernels.slot_mapping", "slot_mapping", "gpu"),
}


def slot_mapping(
    positions: jax.Array,  # i32[num_groups, num_tokens]
    block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    block_size: int,
    pad_slot: int,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """Finds the slot of every token in every KV cache group.

    Example: `block_size` 4, one request with block table [7, 3], two tokens at positions [4, 5]
    and one of padding, `query_start_loc` [0, 2] -> slots [12, 13, pad_slot].

    Under context parallelism, the tokens of a request are distributed over ranks, `cp_interleave`
    positions to each in turn. A logical block then covers `block_size * cp_world_size` positions,
    and every rank holds `block_size` of them. Tokens of other ranks get `pad_slot` and are not
    written.

    Example: `block_size` 4, 2 ranks, interleave 2, block table [7]: positions 0..7 are written by
    rank 0 into slots [28, 29, -, -, 30, 31, -, -], by rank 1 into [-, -, 28, 29, -, -, 30, 31].

    Args:
        positions: Position of each token in its request, in
            `[0, max_blocks_per_req * block_size * cp_world_size)`. Padding may hold anything.
        block_tables: Physical block of each logical block. Entries that no position reaches may
            hold anything.
        query_start_loc: Starts at 0, non-decreasing; request r owns tokens
            `[query_start_loc[r], query_start_loc[r + 1])`. Tokens from the last entry on are
            padding.
        pad_slot: The slot of padding tokens, from `pallas_kernels.pad_slot`.
        cp_world_size: The number of ranks; 1 means no context parallelism.
        cp_rank: The rank whose slots to find, in `[0, cp_world_size)`.
        cp_interleave: Number of neighboring positions that a rank holds; it divides `block_size`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype, a static integer or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: `BlockTable.compute_slot_mapping` in vllm/v1/worker/block_table.py.
    """
    require_shape("slot_mapping", "positions", positions, ("num_groups", "num_tokens"))
    num_groups = positions.shape[0]
    wanted_tables = (num_groups, "num_reqs", "max_blocks_per_req")
    require_shape("slot_mapping", "block_tables", block_tables, wanted_tables)
    num_reqs = block_tables.shape[1]
    require_shape("slot_mapping", "query_start_loc", query_start_loc, (num_reqs + 1,))
    require_int32(
        "slot_mapping",
        positions=positions,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
    )
    require_at_least("slot_mapping", "block_size", block_size, 1)
    require_at_least("slot_mapping", "pad_slot", pad_slot, 0)
    _check_context_parallel(block_size, cp_world_size, cp_rank, cp_interleave)
    if not block_tables.size:  # no request, or none with a block: all tokens are padding
        return jnp.full(positions.shape, pad_slot, jnp.int32)
    return run_op(
        "slot_mapping",
        _BODIES,
        implementation,
        target,
        positions,
        block_tables,
        query_start_loc,
        block_size=block_size,
        pad_slot=pad_slot,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )


def _check_context_parallel(
    block_size: int, cp_world_size: int, cp_rank: int, cp_interleave: int
) -> None:
    require_at_least("slot_mapping", "cp_world_size", cp_world_size, 1)
    require_at_least("slot_mapping", "cp_interleave", cp_interleave, 1)
    if not 0 <= cp_rank < cp_world_size:
        raise ValueError(
            f"slot_mapping: cp_rank is out of range: got {cp_rank}, wanted [0, {cp_world_size})."
        )
    if block_size % cp_interleave:
        raise ValueError(
            f"slot_mapping: cp_interleave must divide the block size: got {cp_interleave}, "
            f"wanted a divisor of {block_size}."
        )
    # Positions that a logical block covers: bodies divide by it.
    num_positions = int(block_size) * int(cp_world_size)
    require_at_least("slot_mapping", "block_size * cp_world_size", num_positions, 1)
