"""The list of blocks over which the decode loop of the plain-JAX body iterates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import rows_at

# The list is sorted if it has at most this many entries (docs/design/cpu.md).
MAX_SORTED_ENTRIES = 8192


class BlockList(NamedTuple):
    """Entries of the block tables that the decode loop reads.

    `codes` has the entries to read, in the order of physical blocks, and then all others. Reading
    blocks in the order of memory is faster than in another order. If there are too many entries to
    sort, `codes` is None, and entries have the order of the tables.
    """

    num_entries: jax.Array  # i32[], number of entries to read
    first_needed: jax.Array  # i32[num_reqs], the first logical block that is read
    entry_ends: jax.Array  # i32[num_reqs], cumulative sum of blocks read
    codes: jax.Array | None  # i32[num_reqs * max_blocks_per_req], req_idx * max_blocks + logical

    def chunk(
        self, start: jax.Array, num: int, max_blocks_per_req: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Entries [start, start + num): i32[num] request, i32[num] logical block, bool[num] real.

        An entry past the end is not real; its request and its logical block are valid indices.
        """
        entry = start + jnp.arange(num, dtype=jnp.int32)
        is_real = entry < self.num_entries
        if self.codes is not None:
            code = rows_at(self.codes, jnp.minimum(entry, self.codes.shape[0] - 1))
            return lax.div(code, max_blocks_per_req), lax.rem(code, max_blocks_per_req), is_real
        num_reqs = self.entry_ends.shape[0]
        req_idx = jnp.searchsorted(self.entry_ends, entry, side="right", method="compare_all")
        req_idx = jnp.minimum(req_idx, num_reqs - 1)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), self.entry_ends[:-1]])
        logical_block = entry - starts[req_idx] + self.first_needed[req_idx]
        return req_idx, jnp.clip(logical_block, 0, max_blocks_per_req - 1), is_real


def list_blocks(
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    first_needed: jax.Array,  # i32[num_reqs]
    num_needed: jax.Array,  # i32[num_reqs], 0 for requests that the loop leaves out
    num_blocks: int,
) -> BlockList:
    """Lists `num_needed` blocks of each request from `first_needed` on.

    Blocks of each request [2, 0, 3] -> ends [2, 2, 5] -> request of entries 0..4: [0, 0, 2, 2, 2].
    """
    entry_ends = jnp.cumsum(num_needed, dtype=jnp.int32)
    num_reqs, max_blocks_per_req = block_tables.shape
    codes = None
    if num_reqs * max_blocks_per_req <= MAX_SORTED_ENTRIES:
        logical_block = jnp.arange(max_blocks_per_req, dtype=jnp.int32)
        is_needed = logical_block >= first_needed[:, None]
        is_needed &= logical_block < (first_needed + num_needed)[:, None]
        codes = _order_by_block(block_tables.reshape(-1), is_needed.reshape(-1), num_blocks)
    # A sum instead of `entry_ends[-1]`: programs with a sorted list then omit `entry_ends`.
    num_entries = num_needed.sum(dtype=jnp.int32)
    return BlockList(num_entries, first_needed, entry_ends, codes)


def _order_by_block(
    block_ids: jax.Array,  # i32[num_entries], anything where not needed
    is_needed: jax.Array,  # bool[num_entries]
    num_blocks: int,
) -> jax.Array:  # i32[num_entries]
    """Indices of all entries: the needed ones by block id, then the others.

    Block and index are packed into one number, because sorting pairs takes five times as long. If
    they do not fit, neighboring blocks count as one: the order need not be exact.
    """
    (num_entries,) = block_ids.shape
    room = 2**32 // num_entries - 1  # places 0 to room - 1 for blocks, and one for unneeded entries
    neighbours = -(-num_blocks // room)
    place = jnp.where(is_needed, block_ids, 0).astype(jnp.uint32) // jnp.uint32(neighbours)
    place = jnp.where(is_needed, place, jnp.uint32(room))
    index = jnp.arange(num_entries, dtype=jnp.uint32)
    packed = lax.sort(place * jnp.uint32(num_entries) + index)
    return (packed % jnp.uint32(num_entries)).astype(jnp.int32)
