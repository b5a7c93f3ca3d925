"""`HeadMemory`: the last computation of a draft head for each request, and where programs keep it.

A burst begins with drafts that follow from the head's last computation in the program before it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxkv.runner.shapes.step_variant import DeviceArray

_NUMBERS, _HIDDEN = "head_numbers", "head_hidden"


class HeadMemory(NamedTuple):
    """The head's last computation for each row. At position p, the head reads token p + 1."""

    has_drafts: jax.Array  # bool[num_rows]; false: the head computed none of the others
    positions: jax.Array  # i32[num_rows]
    token_ids: jax.Array  # i32[num_rows]
    hidden: jax.Array  # f[num_rows, hidden], the input for that token
    next_hidden: jax.Array  # f[num_rows, hidden], the output for that token
    draft_ids: jax.Array  # i32[num_rows], the draft after that token


def head_memory_arrays(*, num_rows: int, hidden_size: int, dtype: str) -> dict[str, DeviceArray]:
    """The arrays that keep a `HeadMemory` for each row of the `InputBatch`.

    Each row of numbers has the tenancy for which it was written, and then the fields of the memory.
    """
    return {
        _NUMBERS: DeviceArray(dims=(num_rows, 4), dtype="int32", is_donated=True),
        _HIDDEN: DeviceArray(dims=(num_rows, 2, hidden_size), dtype=dtype, is_donated=True),
    }


def head_memory_of(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the arrays of `head_memory_arrays`; empty if there are none."""
    return {name: arrays[name] for name in (_NUMBERS, _HIDDEN) if name in arrays}


def read_memory(
    kept: Mapping[str, jax.Array],
    tenancies: jax.Array,  # i32[2, num_reqs], see `PackedLayout`
    positions: jax.Array,  # i32[num_reqs], of the last known token
) -> HeadMemory:
    """Reads the rows of some requests.

    A request has drafts if the head's last computation for it is at the position before its last
    known token. Otherwise, its field `positions` has the position of this token. The head may write
    keys and values there, because the next step overwrites them.
    """
    rows, tenancy = tenancies
    kept_tenancy, kept_positions, token_ids, draft_ids = kept[_NUMBERS][rows].T
    has_drafts = (kept_tenancy == tenancy) & (kept_positions == positions - 1)
    hidden, next_hidden = jnp.moveaxis(kept[_HIDDEN][rows], 1, 0)
    return HeadMemory(
        has_drafts=has_drafts,
        positions=jnp.where(has_drafts, kept_positions, positions),
        token_ids=token_ids,
        hidden=hidden,
        next_hidden=next_hidden,
        draft_ids=draft_ids,
    )


def write_memory(
    kept: Mapping[str, jax.Array],
    tenancies: jax.Array,  # i32[2, num_reqs], see `PackedLayout`
    memory: HeadMemory,
) -> dict[str, jax.Array]:
    """Replaces the rows of requests that have drafts."""
    rows, tenancy = tenancies
    # Places past the end are not written.
    places = jnp.where(memory.has_drafts, rows, kept[_NUMBERS].shape[0])
    numbers = (tenancy, memory.positions, memory.token_ids, memory.draft_ids)
    hidden = jnp.stack([memory.hidden, memory.next_hidden], axis=1)
    return {
        _NUMBERS: kept[_NUMBERS].at[places].set(jnp.stack(numbers, axis=1), mode="drop"),
        _HIDDEN: kept[_HIDDEN].at[places].set(hidden.astype(kept[_HIDDEN].dtype), mode="drop"),
    }
