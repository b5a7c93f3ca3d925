"""Ragged attention for Hopper (sm_90a) in Mosaic GPU: prompts and chunks of prompts, paged K and V.

The batch is cut into tiles (`ragged_tiles`). One CTA (`mosaic_gpu_ragged_kernel`) computes each.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.mosaic_gpu_ragged_kernel import RaggedKernel
from pallas_kernels.paged_attention.mosaic_gpu_ragged_rows import LOG2_E
from pallas_kernels.paged_attention.ragged_tiles import (
    CHUNK,
    NUM_COMPUTE_WARPGROUPS,
    RaggedConfig,
    SeenKeys,
    default_ragged_config,
    plan_tiles,
)

_HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
_DTYPES = ("bfloat16", "float16")


def ragged_misfit(
    q: jax.Array,
    kv_cache: jax.Array,
    *,
    scale: float,
) -> str | None:
    """Why the kernel cannot do a call; None if it can. Only shapes, dtypes and scale matter."""
    *_, block_size, head_dim = kv_cache.shape
    if q.dtype.name not in _DTYPES:
        return f"wgmma multiplies {' and '.join(_DTYPES)}, q is {q.dtype.name}"
    if kv_cache.dtype != q.dtype:
        return f"the cache's dtype ({kv_cache.dtype.name}) is not q's ({q.dtype.name})"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim is {head_dim}; it must be one of {_HEAD_DIMS}"
    kv_tile = default_ragged_config(
        head_dim=head_dim, group_size=1, itemsize=q.dtype.itemsize
    ).kv_tile
    if block_size % 8 or (kv_tile % block_size and block_size % kv_tile):
        return f"blocks of {block_size} tokens do not fill tiles of {kv_tile} keys"
    if not scale > 0:
        return f"scale is {scale}; it must be positive, as maxima are taken before scaling"
    return None


def ragged_rows_mosaic_gpu(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # f[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    skip_single: bool,
    config: RaggedConfig | None = None,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """Computes attention for requests with more than one query token, or for all requests.

    Args:
        skip_single: Whether requests with one query token are left out.
        config: Sizes of the tiles; None is the default rule.
        interpret: False or `plgpu.InterpretGPUParams`.

    Returns:
        The output and the natural logarithm of the softmax's denominator, as `api.paged_attention`
        without sinks. Rows of padding tokens and of omitted requests are undefined, may be NaN.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_halves, num_kv_heads, block_size, _ = kv_cache.shape
    group_size = num_q_heads // num_kv_heads
    if config is None:
        config = default_ragged_config(
            head_dim=head_dim, group_size=group_size, itemsize=q.dtype.itemsize
        )
    if group_size % config.heads_per_tile:
        raise ValueError(
            f"ragged_rows_mosaic_gpu: got {config.heads_per_tile=} for groups of {group_size} "
            "query heads, wanted a divisor. Pass config=None to use a config that fits."
        )
    seen = SeenKeys(is_causal=is_causal, sliding_window=sliding_window, chunk_size=chunk_size)
    plan, token_rows = plan_tiles(
        query_start_loc,
        seq_lens,
        num_tokens=num_tokens,
        config=config,
        seen=seen,
        skip_single=skip_single,
    )
    # logits = c * tanh(scale / c * products); the kernel's exponentials are powers of two.
    kernel = RaggedKernel(
        config=config,
        seen=seen,
        num_blocks=num_halves // 2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        group_size=group_size,
        head_dim=head_dim,
        max_blocks_per_req=block_tables.shape[1],
        dtype=q.dtype.name,
        tanh_factor=None if soft_cap is None else scale / soft_cap,
        exponent_factor=(scale if soft_cap is None else soft_cap) * LOG2_E,
        is_interpreted=bool(interpret),
    )
    # The TMA box of a tile is 64 columns wide, and must not have more tokens than the array.
    padding = (max(0, config.tokens_per_warpgroup - num_tokens), 0, -head_dim % CHUNK)
    out, lse_tiles = kernel.launch(
        jnp.pad(q, [(0, missing) for missing in padding]),
        # Blocks of all rows and heads in one dimension: TMA boxes have at most 5.
        kv_cache.reshape(-1, block_size, head_dim),
        row.reshape(1),
        block_tables,
        plan,
        interpret=interpret,
    )
    return out[:num_tokens, :, :head_dim], _lse_of_tokens(lse_tiles, token_rows, config)


def _lse_of_tokens(
    lse_tiles: jax.Array,  # f32[num_tiles, num_head_groups, NUM_COMPUTE_WARPGROUPS, 64]
    token_rows: jax.Array,  # i32[num_tokens]
    config: RaggedConfig,
) -> jax.Array:  # f32[num_tokens, num_q_heads]
    num_tiles, num_head_groups = lse_tiles.shape[:2]
    by_head = lse_tiles.reshape(
        num_tiles,
        num_head_groups,
        NUM_COMPUTE_WARPGROUPS,
        config.heads_per_tile,
        config.tokens_per_warpgroup,
    )
    by_token = by_head.transpose(0, 2, 4, 1, 3)
    return by_token.reshape(num_tiles * config.tokens_per_tile, -1)[token_rows]
