"""Static sizes of the TPU kernel, and the list of its passes, made by XLA before the launch.

A query tile is `tile_tokens` consecutive tokens of the flat batch, of one or several requests, so
tiles are always aligned. A pass is one request's share of one tile; the kernel's grid is over
passes. With tiles of 4 tokens, query_start_loc [0, 1, 7, 8] gives the passes (tile 0, request 0,
tokens 0:1), (0, 1, 1:4), (1, 1, 4:7), (1, 2, 7:8).
"""

import enum
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128
# Rows that are interleaved in VMEM: 8 of float32, 16 of bfloat16. Slices of Q are aligned to it.
ROW_TILE = 16
# Rows that are interleaved in HBM, for every dtype. Copied blocks must be a multiple of it.
HBM_ROW_TILE = 8

# Limits of tiles; guesses, not measured: rows of Q of one KV head (a matrix unit is 128 or 256
# high), rows of all KV heads (they and their accumulator stay in VMEM), keys of a KV tile, and VMEM
# of the KV tiles, which are shortened if they exceed it.
MAX_TILE_ROWS = 256
MAX_TILE_ROWS_OF_ALL_HEADS = 2048
MAX_KV_TILE_TOKENS = 512
KV_TILES_BYTES = 8 * 2**20
# v5e and v6e have 128 MiB of VMEM per core. XLA and the kernel's products need some of it too.
MAX_SCRATCH_BYTES = 48 * 2**20
VMEM_LIMIT_BYTES = 96 * 2**20
# SMEM is 1 MiB on v5e and v6e.
MAX_SCALAR_BYTES = 768 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Sizes of the kernel's tiles. A row is one token of one query head."""

    num_kv_heads: int
    group_size: int  # query heads of one KV head; their rows of a token are next to each other
    tile_tokens: int
    # Rows that a pass with one token computes: an aligned window that contains the token's rows.
    window_rows: int
    block_size: int
    tile_blocks: int  # blocks of one KV tile

    @property
    def tile_rows(self) -> int:
        """Rows of a query tile, for one KV head."""
        return self.tile_tokens * self.group_size

    @property
    def kv_tile_tokens(self) -> int:
        """Keys of one KV tile."""
        return self.tile_blocks * self.block_size


def make_plan(q: jax.Array, kv_cache: jax.Array) -> TilePlan:
    """Chooses tile sizes from shapes and dtypes alone."""
    num_tokens, num_q_heads, _ = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group_size = num_q_heads // num_kv_heads
    max_rows = min(MAX_TILE_ROWS, MAX_TILE_ROWS_OF_ALL_HEADS // num_kv_heads)
    tile_tokens = ROW_TILE // math.gcd(group_size, ROW_TILE)
    while 2 * tile_tokens * group_size <= max_rows and tile_tokens < num_tokens:
        tile_tokens *= 2
    # Token t's rows begin at t * group_size, up to ROW_TILE - gcd rows into an aligned window: with
    # 3 rows per token, token 5 has rows 15:18, in the window 0:32.
    reach = ROW_TILE - math.gcd(group_size, ROW_TILE) + group_size
    window_rows = min(round_up(reach, ROW_TILE), tile_tokens * group_size)

    # A KV tile has whole blocks. It also has whole lanes, because it is the logits' minor axis.
    step_blocks = LANES // math.gcd(block_size, LANES)
    fitting = min(MAX_KV_TILE_TOKENS // block_size, KV_TILES_BYTES // (2 * _block_bytes(kv_cache)))
    return TilePlan(
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        tile_tokens=tile_tokens,
        window_rows=window_rows,
        block_size=block_size,
        tile_blocks=max(1, fitting // step_blocks) * step_blocks,
    )


def scratch_bytes(plan: TilePlan, q: jax.Array, kv_cache: jax.Array) -> int:
    """VMEM of the kernel's buffers: KV tiles, two each for Q and output, and running softmax."""
    kv_bytes = 2 * plan.tile_blocks * _block_bytes(kv_cache)
    head_dim = round_up(kv_cache.shape[-1], LANES)
    row_bytes = 4 * head_dim * q.dtype.itemsize + 4 * (head_dim + 3 * LANES)
    return kv_bytes + plan.num_kv_heads * plan.tile_rows * row_bytes


def scalar_bytes(plan: TilePlan, q: jax.Array, block_tables: jax.Array) -> int:
    """SMEM of the kernel: the passes, and the block tables of two requests."""
    num_reqs, max_blocks_per_req = block_tables.shape
    num_passes = round_up(max_passes(q.shape[0], num_reqs, plan.tile_tokens), LANES)
    return 4 * (8 * num_passes + 2 * round_up(max_blocks_per_req, LANES))


def _block_bytes(kv_cache: jax.Array) -> int:
    """VMEM bytes of one block of one row: keys and values of all its heads."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    return 2 * num_kv_heads * block_size * round_up(head_dim, LANES) * kv_cache.dtype.itemsize


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less than `number`."""
    return -(-number // multiple) * multiple


class PassField(enum.IntEnum):
    """Rows of the array of passes."""

    TILE = 0
    REQ = 1
    FIRST_TOKEN = 2  # of the request's share, counted from the tile's first token
    NUM_TOKENS = 3
    FIRST_POSITION = 4  # of the first token in its sequence
    FIRST_KEY = 5  # position of the first key that any of the tokens sees
    END_KEY = 6  # one past the last


def max_passes(num_tokens: int, num_reqs: int, tile_tokens: int) -> int:
    """The largest number of passes: each request begins one, and so does each tile."""
    return -(-num_tokens // tile_tokens) + num_reqs


def make_passes(
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    num_tokens: int,
    tile_tokens: int,
    *,
    is_causal: bool,
    sliding_window: int | None,
    chunk_size: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Lists the passes in the order of their tokens.

    Returns:
        i32[num_fields, max_passes], and i32[1], the number of passes. Unused entries repeat the
        tile of the last pass, so that nothing is fetched or written for them.
    """
    num_reqs = seq_lens.shape[0]
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    first_tile = starts // tile_tokens
    num_passes = jnp.where(ends > starts, (ends - 1) // tile_tokens - first_tile + 1, 0)
    pass_ends = jnp.cumsum(num_passes, dtype=jnp.int32)  # i32[num_reqs]

    idx = jnp.arange(max_passes(num_tokens, num_reqs, tile_tokens), dtype=jnp.int32)
    idx = jnp.minimum(idx, jnp.maximum(pass_ends[-1] - 1, 0))
    req = jnp.searchsorted(pass_ends, idx, side="right", method="compare_all").astype(jnp.int32)
    req = jnp.minimum(req, num_reqs - 1)
    tile = first_tile[req] + idx - (pass_ends - num_passes)[req]
    first_token = jnp.maximum(starts[req], tile * tile_tokens)
    end_token = jnp.minimum(ends[req], (tile + 1) * tile_tokens)

    first_position = seq_lens[req] - (ends[req] - first_token)
    end_key = seq_lens[req]
    first_key = jnp.zeros_like(end_key)
    if is_causal:
        end_key = jnp.minimum(end_key, first_position + end_token - first_token)
    if sliding_window is not None:
        first_key = jnp.maximum(first_position - sliding_window + 1, 0)
    if chunk_size is not None:
        first_key = first_position // chunk_size * chunk_size
    fields = {
        PassField.TILE: tile,
        PassField.REQ: req,
        PassField.FIRST_TOKEN: first_token - tile * tile_tokens,
        PassField.NUM_TOKENS: end_token - first_token,
        PassField.FIRST_POSITION: first_position,
        PassField.FIRST_KEY: first_key,
        PassField.END_KEY: end_key,
    }
    return jnp.stack([fields[field] for field in PassField]), pass_ends[-1:]
