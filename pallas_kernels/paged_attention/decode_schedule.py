"""Divides the decode kernel's work into shares, and merges the partial results.

A unit is one KV tile of one KV head of one request. The list contains all units, ordered by
request, head and tile. Requests without tiles have no units. Example: three requests of 2, 0 and 3
tiles, and 2 KV heads:

    request        0        0        2           2
    head           0        1        0           1
    unit         0   1    2   3    4   5   6    7   8   9

A share is the contiguous range of units that one program of the kernel's grid computes. A segment
is the part of one (request, head) in one share. The kernel writes one partial result per segment.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Columns of `DecodeSchedule.requests`.
FIRST_UNIT, NUM_TILES, FIRST_TILE, FIRST_SEEN, SEQ_LEN, NEXT_REQUEST = range(6)
# Columns of `DecodeSchedule.shares`.
START_UNIT, END_UNIT, START_REQUEST = range(3)


class DecodeSchedule(NamedTuple):
    """The list of units and its shares, as the kernel reads them from device memory.

    `requests` has one row per request: its first unit; its number of tiles per head, possibly 0;
    its first tile, counted from position 0; the first position seen; the end of the sequence; the
    next request that has tiles. `shares` has one row per share: its first unit, the unit after its
    last one, and the request of its first unit.
    """

    requests: jax.Array  # i32[num_reqs, 6]
    shares: jax.Array  # i32[num_shares, 3]
    # i32[], the units of a share; None if no (request, head) is cut.
    share_len: jax.Array | None


def schedule_requests(
    first_seen: jax.Array,  # i32[num_reqs]
    seq_lens: jax.Array,  # i32[num_reqs], 0 for requests to leave out
    *,
    num_kv_heads: int,
    kv_tile: int,
) -> jax.Array:  # i32[num_reqs, 6]
    """Lists the units of requests, without tiles wholly left of the first position seen."""
    first_tile = first_seen // kv_tile
    num_tiles = jnp.maximum((seq_lens + kv_tile - 1) // kv_tile - first_tile, 0)
    end_unit = jnp.cumsum(num_tiles, dtype=jnp.int32) * num_kv_heads
    columns = (
        end_unit - num_tiles * num_kv_heads,
        num_tiles,
        first_tile,
        first_seen,
        seq_lens,
        _count_at_most(end_unit, end_unit),
    )
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def one_share_per_head(requests: jax.Array, num_kv_heads: int) -> DecodeSchedule:
    """Single pass: share i is head i % num_kv_heads of request i // num_kv_heads, uncut."""
    num_reqs = requests.shape[0]
    req_idx = jnp.repeat(jnp.arange(num_reqs, dtype=jnp.int32), num_kv_heads)
    head = jnp.tile(jnp.arange(num_kv_heads, dtype=jnp.int32), num_reqs)
    num_tiles = requests[req_idx, NUM_TILES]
    start_unit = requests[req_idx, FIRST_UNIT] + head * num_tiles
    shares = jnp.stack([start_unit, start_unit + num_tiles, req_idx], axis=1)
    return DecodeSchedule(requests, shares, None)


def equal_shares(
    requests: jax.Array, num_kv_heads: int, *, num_shares: int, min_share: int
) -> DecodeSchedule:
    """Split-KV: cuts the list into equal shares, which may hold units of several requests.

    The last shares may be shorter or empty. A share has at least `min_share` units, so that a short
    list is not cut into tiny shares.
    """
    end_unit = requests[:, FIRST_UNIT] + requests[:, NUM_TILES] * num_kv_heads
    num_units = end_unit[-1]
    share_len = jnp.maximum((num_units + num_shares - 1) // num_shares, min_share)
    start_unit = jnp.minimum(jnp.arange(num_shares, dtype=jnp.int32) * share_len, num_units)
    shares = (
        start_unit,
        jnp.minimum(start_unit + share_len, num_units),
        _count_at_most(end_unit, start_unit),
    )
    return DecodeSchedule(requests, jnp.stack(shares, axis=1).astype(jnp.int32), share_len)


def num_partials(num_reqs: int, num_kv_heads: int, num_shares: int | None) -> int:
    """The largest number of partial results; `num_shares` is None for a single pass.

    A segment of share c and of (request, head) number g writes to slot c + g. From one segment to
    the next, c or g or both grow, so no two segments have the same slot.
    """
    num_rows = num_reqs * num_kv_heads
    return num_rows if num_shares is None else num_rows + num_shares - 1


def merge_partials(
    schedule: DecodeSchedule,
    out: jax.Array,  # f32[num_partials, head_dim, rows]
    lse: jax.Array,  # f32[num_partials, rows]
    num_kv_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """Merges the partial results of each (request, head) by their logarithms of the denominator.

    Slots that no segment wrote may hold anything. Requests without tiles have no segments, so their
    results are undefined; the caller masks them.

    Returns:
        f32[num_reqs * num_kv_heads, head_dim, rows] and f32[num_reqs * num_kv_heads, rows].
    """
    if schedule.share_len is None:
        return out, lse
    num_reqs = schedule.requests.shape[0]
    num_rows = num_reqs * num_kv_heads
    row = jnp.arange(num_rows, dtype=jnp.int32)
    num_tiles = schedule.requests[row // num_kv_heads, NUM_TILES]
    start = schedule.requests[row // num_kv_heads, FIRST_UNIT] + row % num_kv_heads * num_tiles
    first_slot = row + start // schedule.share_len
    last_slot = row + (start + num_tiles - 1) // schedule.share_len

    slot = jnp.arange(out.shape[0], dtype=jnp.int32)
    row_of_slot = _count_at_most(first_slot, slot) - 1  # i32[num_partials]
    is_written = (slot <= last_slot[row_of_slot]) & (num_tiles[row_of_slot] > 0)
    target = jnp.where(is_written, row_of_slot, num_rows)  # past the end: dropped

    lse = jnp.where(is_written[:, None], lse, -jnp.inf)
    largest = jnp.full((num_rows, lse.shape[1]), -jnp.inf).at[target].max(lse, mode="drop")
    # Where nothing was written, the difference of two infinities would be NaN.
    weight = jnp.where(is_written[:, None], jnp.exp(lse - largest[row_of_slot]), 0.0)
    total = jnp.zeros(largest.shape).at[target].add(weight, mode="drop")
    weighted = jnp.where(is_written[:, None, None], out, 0.0) * weight[:, None, :]
    merged = jnp.zeros((num_rows, *out.shape[1:])).at[target].add(weighted, mode="drop")
    return merged / jnp.where(total > 0, total, 1.0)[:, None, :], largest + jnp.log(total)


def _count_at_most(sorted_values: jax.Array, limits: jax.Array) -> jax.Array:
    """Counts, for each limit, the values that do not exceed it, by comparing all pairs."""
    return jnp.sum(sorted_values[None, :] <= limits[:, None], axis=1, dtype=jnp.int32)
