"""Cuts the work of the ragged Mosaic GPU kernel into tiles: their sizes, and a batch's plan.

A tile is the work of one CTA: some consecutive query tokens of one request times some of the query
heads that share a KV head. Its rows are cut in two halves, one for each compute warpgroup.
"""

from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax

# A wgmma instruction multiplies 64 rows, held by the 4 warps of one warpgroup.
ROWS_PER_WARPGROUP = 64
NUM_COMPUTE_WARPGROUPS = 2
# Columns of Q and of the output that one TMA box holds: 128 bytes, the widest swizzle.
CHUNK = 64
# A CTA's shared memory on an H100 or H200 (227 KiB), and the part for barriers and alignment.
SMEM_BYTES = 232_448
_SMEM_RESERVE_BYTES = 2_048
_MAX_STAGES = 4
_MAX_Q_BOXES = 8
# The widest output whose 64 rows a warpgroup holds in registers.
MAX_V_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedConfig:
    """Sizes of the tiles of the ragged kernel."""

    heads_per_tile: int  # query heads of one KV head whose rows share a tile
    kv_tile: int  # keys that are read and multiplied at a time, 32 or a multiple of 64
    num_stages: int  # K and V tiles in flight, at least 2

    def __post_init__(self) -> None:
        rows = ROWS_PER_WARPGROUP
        if self.heads_per_tile < 1 or rows % (8 * self.heads_per_tile):
            raise ValueError(
                f"heads_per_tile is out of range: got {self.heads_per_tile}, wanted 1, 2, 4 or 8: "
                f"a head's rows are a multiple of 8 that divides {rows}."
            )
        if self.kv_tile != 32 and (self.kv_tile < 64 or self.kv_tile % 64):
            raise ValueError(f"kv_tile: got {self.kv_tile}, wanted 32 or a multiple of 64.")
        if self.num_stages < 2:
            # The two warpgroups are half a step apart. With one stage, each would wait until the
            # other frees the stage.
            raise ValueError(f"num_stages is too small: got {self.num_stages}, wanted at least 2.")

    @property
    def tokens_per_warpgroup(self) -> int:
        return ROWS_PER_WARPGROUP // self.heads_per_tile

    @property
    def tokens_per_tile(self) -> int:
        return NUM_COMPUTE_WARPGROUPS * self.tokens_per_warpgroup

    def smem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of the Q (and output) tile and of all stages of K and V."""
        chunk_columns = -(-head_dim // CHUNK) * CHUNK
        # The tile that wgmma reads and the chunks share memory only if their sizes are equal.
        q_columns = head_dim if chunk_columns == head_dim else head_dim + chunk_columns
        q_elements = NUM_COMPUTE_WARPGROUPS * ROWS_PER_WARPGROUP * q_columns
        kv_columns = head_dim + v_part_width(head_dim)
        return (q_elements + self.num_stages * self.kv_tile * kv_columns) * itemsize


def v_part_width(head_dim: int) -> int:
    """Columns of V, and so of the output, that one CTA computes.

    The output of 64 rows of 512 columns would take 256 registers per thread. So a CTA has half the
    columns, and the scores are computed twice.
    """
    return head_dim if head_dim <= MAX_V_WIDTH else head_dim // 2


def default_ragged_config(*, head_dim: int, group_size: int, itemsize: int) -> RaggedConfig:
    """Sizes to use until better sizes are measured. All of them are guesses.

    - heads_per_tile: a power of two that divides the group, so that no row is padding. With more
      heads, a tile has fewer tokens, so the causal diagonal and the ends of requests cut off less
      of it. But Q is copied in boxes of one head and 64 columns, and the compiler keeps the
      addresses of the boxes in registers. With more than 8 boxes, head_dim 256 spills.
    - kv_tile: 128 keys make long wgmma chains and few barriers. Heads of more than 128 columns have
      64 keys, because scores, weights and output together must fit in 232 registers per thread.
      Heads of 512 have 32, because two larger stages do not fit in shared memory.
    - num_stages: as many as shared memory holds, at most 4.
    """
    boxes_per_head = -(-head_dim // CHUNK)
    heads_per_tile = max(
        heads
        for heads in (1, 2, 4, 8)
        if group_size % heads == 0 and heads * boxes_per_head <= _MAX_Q_BOXES
    )
    kv_tile = 128 if head_dim <= 128 else 64 if head_dim <= MAX_V_WIDTH else 32
    stages_that_fit = [
        config
        for num_stages in range(2, _MAX_STAGES + 1)
        if (
            config := RaggedConfig(
                heads_per_tile=heads_per_tile, kv_tile=kv_tile, num_stages=num_stages
            )
        ).smem_bytes(head_dim, itemsize)
        <= SMEM_BYTES - _SMEM_RESERVE_BYTES
    ]
    return stages_that_fit[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """Which keys a query token reads: always one interval of positions."""

    is_causal: bool
    sliding_window: int | None
    chunk_size: int | None

    @property
    def has_left_edge(self) -> bool:
        """Whether a token may not see the first keys of its request."""
        return self.sliding_window is not None or self.chunk_size is not None

    def start(self, position: jax.Array) -> jax.Array:  # i32[...] of any shape
        """First key that a token at `position` sees.

        At position 9: with a window of 4 it is 6, with chunks of 8 it is 8.
        """
        if self.sliding_window is not None:
            return jnp.maximum(position - (self.sliding_window - 1), 0)
        if self.chunk_size is not None:
            position = jnp.maximum(position, 0)
            return position - lax.rem(position, jnp.full_like(position, self.chunk_size))
        return jnp.zeros_like(position)

    def end(self, position: jax.Array, seq_len: jax.Array) -> jax.Array:  # i32[...]
        """One past the last key that the token sees."""
        return jnp.minimum(position + 1, seq_len) if self.is_causal else seq_len


class PlanField(IntEnum):
    """Columns of a plan. They describe the tile of a CTA.

    The KV tiles that a tile reads are [KV_START, KV_END). Every token of the tile sees all keys in
    [FULL_START, FULL_END), so these KV tiles need no mask. KV tiles at either edge need a mask.
    """

    TILE_IDX = 0  # place of the tile in the order of the batch
    REQ_IDX = 1
    FIRST_TOKEN = 2  # index in the batch of the tile's first query token
    NUM_TOKENS = 3  # query tokens of the tile; 0 for an unused row
    FIRST_POSITION = 4  # position of the first query token in its request
    SEQ_LEN = 5
    SEEN_START = 6  # first key that any token of the tile sees
    KV_START = 7
    FULL_START = 8
    FULL_END = 9
    KV_END = 10


def max_num_tiles(num_tokens: int, num_reqs: int, tokens_per_tile: int, skip_single: bool) -> int:
    """The most tiles that a batch of these sizes can have.

    Every request may end with a tile of one token: 2 requests that share 10 tokens have at most 3
    tiles of 8 (9 and 1). Requests with tiles have at least one token, or two with `skip_single`.
    """
    num_reqs = min(num_reqs, num_tokens // (2 if skip_single else 1))
    return max(1, (num_tokens + num_reqs * (tokens_per_tile - 1)) // tokens_per_tile)


def plan_tiles(
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    seq_lens: jax.Array,  # i32[num_reqs]
    *,
    num_tokens: int,
    config: RaggedConfig,
    seen: SeenKeys,
    skip_single: bool,
) -> tuple[jax.Array, jax.Array]:  # i32[num_tiles, len(PlanField)], i32[num_tokens]
    """Cuts a batch into tiles.

    Returns:
        The plan, with one row per CTA, the longest first, so that the last CTAs to start are short.
        And each token's row in the concatenation of the unsorted tiles: tile * tokens_per_tile +
        token of the tile. Tokens that are in no tile get an arbitrary row.

    All pairs are compared: XLA would turn a binary search into a while loop. On a GPU, the loop
    costs more than these small tables, and cannot be in a CUDA graph.
    """
    tokens_per_tile = config.tokens_per_tile
    num_reqs = seq_lens.shape[0]
    num_tiles = max_num_tiles(num_tokens, num_reqs, tokens_per_tile, skip_single)
    num_query = query_start_loc[1:] - query_start_loc[:-1]  # i32[num_reqs]
    tiled_query = jnp.where(num_query > 1, num_query, 0) if skip_single else num_query
    # 8 tokens per tile, num_query [20, 0, 5] -> tiles [3, 0, 1], ends [3, 3, 4];
    # request of each tile [0, 0, 0, 2], first token inside the request [0, 8, 16, 0].
    tiles_of_req = (tiled_query + (tokens_per_tile - 1)) // tokens_per_tile
    tile_ends = jnp.cumsum(tiles_of_req)
    tile_starts = tile_ends - tiles_of_req

    tile_idx = jnp.arange(num_tiles, dtype=jnp.int32)
    req_idx = jnp.sum(tile_ends[None, :] <= tile_idx[:, None], axis=1, dtype=jnp.int32)
    is_active = req_idx < num_reqs
    req_idx = jnp.minimum(req_idx, num_reqs - 1)
    token_of_req = (tile_idx - tile_starts[req_idx]) * tokens_per_tile
    tile_tokens = jnp.minimum(num_query[req_idx] - token_of_req, tokens_per_tile)
    tile_tokens = jnp.where(is_active, tile_tokens, 0)
    seq_len = seq_lens[req_idx]
    position = seq_len - num_query[req_idx] + token_of_req

    # The ends of intervals grow with the position, so the first and last token bound them all.
    last_position = position + tile_tokens - 1
    seen_start = seen.start(position)
    kv_tile = config.kv_tile
    kv_start = seen_start // kv_tile
    kv_end = (seen.end(last_position, seq_len) + (kv_tile - 1)) // kv_tile
    kv_end = jnp.where(is_active, jnp.maximum(kv_end, kv_start), kv_start)
    full_start = (seen.start(last_position) + (kv_tile - 1)) // kv_tile
    full_start = jnp.clip(full_start, kv_start, kv_end)
    full_end = jnp.clip(seen.end(position, seq_len) // kv_tile, full_start, kv_end)

    columns = {
        PlanField.TILE_IDX: tile_idx,
        PlanField.REQ_IDX: req_idx,
        PlanField.FIRST_TOKEN: query_start_loc[req_idx] + token_of_req,
        PlanField.NUM_TOKENS: tile_tokens,
        PlanField.FIRST_POSITION: position,
        PlanField.SEQ_LEN: seq_len,
        PlanField.SEEN_START: seen_start,
        PlanField.KV_START: kv_start,
        PlanField.FULL_START: full_start,
        PlanField.FULL_END: full_end,
        PlanField.KV_END: kv_end,
    }
    plan = jnp.stack([columns[field] for field in PlanField], axis=1)
    longest_first = jnp.argsort(kv_start - kv_end, stable=True)
    token_rows = _rows_of_tokens(
        query_start_loc, tile_starts, num_tokens=num_tokens, tokens_per_tile=tokens_per_tile
    )
    return plan[longest_first], jnp.clip(token_rows, 0, num_tiles * tokens_per_tile - 1)


def _rows_of_tokens(
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    tile_starts: jax.Array,  # i32[num_reqs]
    *,
    num_tokens: int,
    tokens_per_tile: int,
) -> jax.Array:  # i32[num_tokens]
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    req_idx = jnp.sum(query_start_loc[None, 1:] <= token_idx[:, None], axis=1, dtype=jnp.int32)
    req_idx = jnp.minimum(req_idx, tile_starts.shape[0] - 1)
    return tile_starts[req_idx] * tokens_per_tile + token_idx - query_start_loc[req_idx]
