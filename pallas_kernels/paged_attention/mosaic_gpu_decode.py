"""Decode attention on Hopper: the plain JAX before and after the kernel.

Before the kernel, the schedule assigns tiles of requests to programs. After it, partial results are
merged if the work was cut. `mosaic_gpu_decode_kernel.py` explains the kernel.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.decode_schedule import (
    equal_shares,
    merge_partials,
    num_partials,
    one_share_per_head,
    schedule_requests,
)
from pallas_kernels.paged_attention.decode_splits import choose_num_shares
from pallas_kernels.paged_attention.mosaic_gpu_decode_kernel import DecodeKernel
from pallas_kernels.paged_attention.tuned_blocks import (
    DecodeConfig,
    decode_config,
    max_group_size,
    padded_rows,
)

# Heads up to the first width may be padded to the tiles of wgmma. Heads up to the second width must
# fill whole tiles.
_MAX_PADDED_HEAD_DIM, MAX_HEAD_DIM = 256, 512
_DTYPES = ("bfloat16", "float16")


def decode_misfit(q: jax.Array, kv_cache: jax.Array) -> str | None:
    """Why the kernel cannot do a call; None if it can. Only shapes and dtypes matter."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    group_size = q.shape[1] // num_kv_heads
    if q.dtype.name not in _DTYPES:
        return f"wgmma multiplies {' and '.join(_DTYPES)}, q is {q.dtype.name}"
    if kv_cache.dtype != q.dtype:
        return f"the cache's dtype ({kv_cache.dtype.name}) is not q's ({q.dtype.name})"
    step = 16 if head_dim <= _MAX_PADDED_HEAD_DIM else 64
    if head_dim % step or head_dim > MAX_HEAD_DIM:
        return (
            f"head_dim {head_dim} is neither a multiple of 16 up to {_MAX_PADDED_HEAD_DIM} nor one "
            f"of 64 up to {MAX_HEAD_DIM}"
        )
    if group_size > (limit := max_group_size(head_dim)):
        return f"{group_size} query heads share a KV head; registers have room for {limit}"
    kv_tile = decode_config(q.dtype, head_dim, group_size).kv_tile
    if block_size % 8 or (kv_tile % block_size and block_size % kv_tile):
        return f"blocks of {block_size} tokens do not fill tiles of {kv_tile} keys"
    return None


def decode_rows_mosaic_gpu(
    q: jax.Array,  # f[num_reqs, num_q_heads, head_dim], the one query token of each request
    kv_cache: jax.Array,  # f[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs], 0 for requests to leave out
    *,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    config: DecodeConfig | None = None,
    num_shares: int | None | Literal["auto"] = "auto",
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends each request's token at position seq_len - 1 to the positions up to its own.

    Args:
        config: Sizes of tiles; None uses the tuned sizes.
        num_shares: The number of shares that the work is cut into. None: one share per KV head of
            each request, so nothing is merged. "auto": `decode_splits.py` chooses.
        interpret: False or `plgpu.InterpretGPUParams`.

    Returns:
        The output f32[num_reqs, num_q_heads, head_dim] and the natural logarithm of the softmax's
        denominator, f32[num_reqs, num_q_heads]. For requests left out, both are undefined, and may
        be NaN.
    """
    num_reqs, num_q_heads, head_dim = q.shape
    _, num_halves, num_kv_heads, block_size, _ = kv_cache.shape
    group_size = num_q_heads // num_kv_heads
    config = config or decode_config(q.dtype, head_dim, group_size)
    if num_shares == "auto":
        num_shares = choose_num_shares(
            num_reqs=num_reqs,
            num_kv_heads=num_kv_heads,
            max_tiles=_max_tiles(
                block_tables.shape[1] * block_size, config.kv_tile, sliding_window, chunk_size
            ),
            num_programs=config.num_programs,
        )
    requests = schedule_requests(
        _first_seen(seq_lens, sliding_window, chunk_size),
        seq_lens,
        num_kv_heads=num_kv_heads,
        kv_tile=config.kv_tile,
    )
    if num_shares is None:
        schedule = one_share_per_head(requests, num_kv_heads)
    else:
        schedule = equal_shares(
            requests, num_kv_heads, num_shares=num_shares, min_share=config.min_share
        )
    kernel = DecodeKernel(
        config=config,
        group_rows=padded_rows(group_size),
        head_dim=head_dim,
        num_blocks=num_halves // 2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        scale=scale,
        soft_cap=soft_cap,
        has_left_edge=sliding_window is not None or chunk_size is not None,
        is_cut=num_shares is not None,
        is_interpreted=bool(interpret),
    )
    heads_q = q.reshape(num_reqs * num_kv_heads, group_size, head_dim)
    pad_rows = (0, kernel.group_rows - group_size)
    out, lse = kernel.launch(
        jnp.pad(heads_q, ((0, 0), pad_rows, (0, 0))),
        *(kv_cache, row, block_tables, schedule),
        num_slots=num_partials(num_reqs, num_kv_heads, num_shares),
        interpret=interpret,
    )
    out, lse = merge_partials(
        schedule, out[:, :head_dim, :group_size], lse[:, :group_size], num_kv_heads
    )
    return (
        out.swapaxes(1, 2).reshape(num_reqs, num_q_heads, head_dim),
        lse.reshape(num_reqs, num_q_heads),
    )


def _max_tiles(
    max_len: int, kv_tile: int, sliding_window: int | None, chunk_size: int | None
) -> int:
    """The most KV tiles that the last token of a sequence of up to `max_len` tokens sees.

    With tiles of 64, a window of 65 overlaps up to 2 tiles, and a window of 66 up to 3: the last
    key of one tile, all keys of the next, and the first key of the third.
    """
    num_tiles = -(-max_len // kv_tile)
    num_seen = sliding_window if sliding_window is not None else chunk_size
    if num_seen is None:
        return num_tiles
    return min(num_tiles, (num_seen + kv_tile - 2) // kv_tile + 1)


def _first_seen(
    seq_lens: jax.Array,  # i32[num_reqs]
    sliding_window: int | None,
    chunk_size: int | None,
) -> jax.Array:  # i32[num_reqs]
    """The leftmost position that the last token of each sequence sees."""
    if sliding_window is not None:
        return jnp.maximum(seq_lens - sliding_window, 0)
    if chunk_size is not None:
        return jnp.maximum(seq_lens - 1, 0) // chunk_size * chunk_size
    return jnp.zeros_like(seq_lens)
