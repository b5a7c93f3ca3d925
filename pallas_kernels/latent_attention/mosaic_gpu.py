"""Mosaic GPU body of `latent_attention`, for Hopper: decode rows by kernels, prompts by plain XLA.

The tiles of all requests form one list (`decode_schedule.py`), which is cut into as many equal
shares as there are SMs. So 64 requests keep 132 SMs equally busy. In the attention kernel, one CTA
computes one share, and the final result of each request that lies in one share. If a request lies
in several shares, each of them writes a partial result, and the second kernel merges these.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.latent_attention.mosaic_gpu_attend import TILE, attend
from pallas_kernels.latent_attention.mosaic_gpu_merge import merge_partials
from pallas_kernels.latent_attention.tuned_blocks import (
    DEFAULT_CONFIG,
    LatentDecodeConfig,
    num_shares,
)
from pallas_kernels.latent_attention.xla import make_problem
from pallas_kernels.paged_attention.decode_schedule import equal_shares, schedule_requests
from pallas_kernels.paged_attention.xla_prefill import attend_prefill_rows

# Two warpgroups hold 64 x (latent_dim / 2) sums each, and wgmma is at most 256 wide.
_MAX_LATENT_DIM = 512


def misfit(
    q_latent: jax.Array,
    q_rope: jax.Array,
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
) -> str | None:
    """Why the kernels cannot do this call; None if they can."""
    block_size, width = kv_cache.shape[3:]
    latent_dim, rope_dim = q_latent.shape[2], q_rope.shape[2]
    if 0 in (q_latent.size, kv_cache.size, block_tables.size):
        return "an array is empty"
    if kv_cache.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wgmma multiplies numbers of 16 bits, got a cache of {kv_cache.dtype}"
    if q_latent.dtype != kv_cache.dtype:
        return f"q and cache must have one dtype, got {q_latent.dtype} and {kv_cache.dtype}"
    if latent_dim % (2 * TILE) or latent_dim > _MAX_LATENT_DIM:
        return (
            f"latent_dim must be a multiple of {2 * TILE}, at most {_MAX_LATENT_DIM}, "
            f"got {latent_dim=}"
        )
    if rope_dim != TILE:
        return f"the rotary part must be {TILE} wide, got {rope_dim}"
    if width != latent_dim + rope_dim:
        return f"the cache must be {latent_dim + rope_dim} wide (latent, rotary), got {width}"
    if block_size % 8 or (TILE % block_size and block_size % TILE):
        return f"block_size must be 8, 16, 32 or a multiple of {TILE}, got {block_size=}"
    return None


def latent_attention_mosaic_gpu(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    config: LatentDecodeConfig = DEFAULT_CONFIG,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.latent_attention`."""
    num_tokens, num_q_heads, latent_dim = q_latent.shape
    _, num_blocks, _, block_size, width = kv_cache.shape
    num_reqs, max_blocks_per_req = block_tables.shape
    num_head_tiles = pl.cdiv(num_q_heads, TILE)
    sequences = (block_tables, seq_lens, query_start_loc)
    problem = make_problem(
        *(q_latent, q_rope, kv_cache, row, *sequences), scale=scale, kv_dtype=kv_dtype
    )
    if max_query_len == 1:
        out = jnp.zeros(q_latent.shape, q_latent.dtype)
        lse = jnp.full(q_latent.shape[:2], -jnp.inf, jnp.float32)
    else:
        out, lse = (x[:, 0] for x in attend_prefill_rows(problem))
    # A product has 64 rows; rows past the last head are computed and dropped.
    num_unused = num_head_tiles * TILE - num_q_heads
    unused_heads = ((0, 0), (0, num_unused), (0, 0))

    schedule = equal_shares(
        schedule_requests(
            jnp.zeros_like(seq_lens),
            jnp.where(problem.num_query() == 1, seq_lens, 0),
            num_kv_heads=1,
            kv_tile=TILE,
        ),
        num_kv_heads=1,
        num_shares=num_shares(
            config, num_head_tiles, num_reqs * pl.cdiv(max_blocks_per_req * block_size, TILE)
        ),
        min_share=config.min_share,
    )
    # The kernels write the rows of requests with one query token. Other rows stay unchanged.
    out_ref = jax.new_ref(jnp.pad(out.astype(q_latent.dtype), unused_heads))
    lse_ref = jax.new_ref(jnp.pad(lse, unused_heads[:2]))
    partial_out, partial_lse = attend(
        jnp.pad(problem.q[:, 0], unused_heads),
        kv_cache.reshape(-1, block_size, width),
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
