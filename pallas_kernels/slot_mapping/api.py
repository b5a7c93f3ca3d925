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
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # i32[num_groups, num_tokens]
    """Finds the slot of every token in every KV cache group.

    Example: `block_size` 4, one request with block table [7, 3], two tokens at positions [4, 5]
    and one of padding, `query_start_loc` [0, 2] -> slots [12, 13, pad_slot].

    Args:
        positions: Position of each token in its request, in
            `[0, max_blocks_per_req * block_size)`. Padding may hold anything.
        block_tables: Physical block of each logical block. Entries that no position reaches may
            hold anything.
        query_start_loc: Starts at 0, non-decreasing; request r owns tokens
            `[query_start_loc[r], query_start_loc[r + 1])`. Tokens from the last entry on are
            padding.
        pad_slot: The slot of padding tokens, from `pallas_kernels.pad_slot`.
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
    )
