"""Mosaic GPU body of `mla_decode`, for Hopper: an attention kernel, then a merge of what it cut.

The tiles of all requests stand in one line (`decode_schedule.py`), cut into as many equal shares as
there are SMs, whoever's tiles they are: so 64 requests keep 132 SMs equally busy. The attention
kernel computes one share a CTA. A request inside one share is finished there; of a request that a
share's end cuts, each share leaves a partial result, and the second kernel joins these.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mla_decode.mosaic_gpu_attend import TILE, attend
from pallas_kernels.mla_decode.mosaic_gpu_merge import merge_partials
from pallas_kernels.mla_decode.tuned_blocks import DEFAULT_CONFIG, MLADecodeConfig, num_shares
from pallas_kernels.paged_attention.decode_schedule import equal_shares, schedule_requests

# Two warpgroups hold 64 x (latent_dim / 2) sums each, and wgmma is at most 256 wide.
_MAX_LATENT_DIM = 512


def misfit(
    q: jax.Array,
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    latent_dim: int,
    scale: float,
) -> str | None:
    """Why the kernels cannot do this call; None if they can."""
    block_size, cache_dim = kv_cache.shape[3:]
    if 0 in (q.size, kv_cache.size, block_tables.size):
        return "an array is empty"
    if kv_cache.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wgmma multiplies numbers of 16 bits, got a cache of {kv_cache.dtype}"
    if q.dtype != kv_cache.dtype:
        return f"q and cache must have one dtype, got {q.dtype} and {kv_cache.dtype}"
    if latent_dim % (2 * TILE) or latent_dim > _MAX_LATENT_DIM:
        return (
            f"latent_dim must be a multiple of {2 * TILE}, at most {_MAX_LATENT_DIM}, "
            f"got {latent_dim=}"
        )
    if cache_dim - latent_dim != TILE:
        return f"the rotary part must be {TILE} wide, got {cache_dim - latent_dim}"
    if block_size % 8 or (TILE % block_size and block_size % TILE):
        return f"block_size must be 8, 16, 32 or a multiple of {TILE}, got {block_size=}"
    return None


def mla_decode_mosaic_gpu(
    q: jax.Array,  # f[num_tokens, num_q_heads, latent_dim + rope_dim]
    kv_cache: jax.Array,  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    latent_dim: int,
    scale: float,
    config: MLADecodeConfig = DEFAULT_CONFIG,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.mla_decode`."""
    num_tokens, num_q_heads, cache_dim = q.shape
    _, num_blocks, _, block_size, _ = kv_cache.shape
    num_reqs, max_blocks_per_req = block_tables.shape
    num_head_tiles = pl.cdiv(num_q_heads, TILE)
    # Rows of a product with 64 rows: those past the last head are computed and dropped.
    q = jnp.pad(q, ((0, 0), (0, num_head_tiles * TILE - num_q_heads), (0, 0)))

    has_query = query_start_loc[1:] > query_start_loc[:-1]
    schedule = equal_shares(
        schedule_requests(
            jnp.zeros_like(seq_lens),
            jnp.where(has_query, seq_lens, 0),
            num_kv_heads=1,
            kv_tile=TILE,
        ),
        num_kv_heads=1,
        num_shares=num_shares(
            config, num_head_tiles, num_reqs * pl.cdiv(max_blocks_per_req * block_size, TILE)
        ),
        min_share=config.min_share,
    )
    # What no kernel writes, padding and requests without a query, stays as it is here.
    out_ref = jax.new_ref(jnp.zeros((*q.shape[:2], latent_dim), q.dtype))
    lse_ref = jax.new_ref(jnp.full(q.shape[:2], -jnp.inf, jnp.float32))
    partial_out, partial_lse = attend(
        q,
        kv_cache.reshape(-1, block_size, cache_dim),
        (row * num_blocks).reshape(1),
        block_tables,
        query_start_loc,
        schedule.requests,
        schedule.shares,
        out_ref,
        lse_ref,
        latent_dim=latent_dim,
        scale=scale,
        interpret=interpret,
    )
    merge_partials(
        partial_out,
        partial_lse,
        query_start_loc,
        schedule.requests,
        schedule.share_len.reshape(1),
        out_ref,
        lse_ref,
        num_columns=config.merge_columns,
        batch_size=config.merge_batch,
        interpret=interpret,
    )
    return jax.freeze(out_ref)[:, :num_q_heads], jax.freeze(lse_ref)[:, :num_q_heads]
