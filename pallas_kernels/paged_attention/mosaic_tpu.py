"""Mosaic TPU body of `paged_attention`: arranges the arguments and launches the kernel.

`mosaic_tpu_plan.py` cuts the batch into tiles and passes. `mosaic_tpu_kernel.py` computes a pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.alibi import ALIBI_MISFIT
from pallas_kernels.paged_attention.distance_bias import DISTANCE_BIAS_MISFIT
from pallas_kernels.paged_attention.mosaic_tpu_kernel import (
    AttentionRules,
    attend_pass,
)
from pallas_kernels.paged_attention.mosaic_tpu_plan import (
    HBM_ROW_TILE,
    LANES,
    MAX_SCALAR_BYTES,
    MAX_SCRATCH_BYTES,
    VMEM_LIMIT_BYTES,
    PassField,
    TilePlan,
    make_passes,
    make_plan,
    round_up,
    scalar_bytes,
    scratch_bytes,
)


def paged_attention_mosaic_tpu(
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
    sinks: jax.Array | None,  # f32[num_q_heads]
    alibi_slopes: None,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`; `interpret` is passed to `pl.pallas_call`."""
    del alibi_slopes, kv_dtype  # None, because `misfit` rejects other calls
    num_tokens, num_q_heads, _ = q.shape
    plan = make_plan(q, kv_cache)
    rules = AttentionRules(
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
        max_query_len=max_query_len,
    )
    passes, num_passes = make_passes(
        seq_lens,
        query_start_loc,
        num_tokens,
        plan.tile_tokens,
        is_causal=is_causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
    )
    out, lse = _launch(
        *(jnp.asarray(row, jnp.int32).reshape(1), num_passes, passes),
        *(_whole_lanes(block_tables), kv_cache, _rows_by_kv_head(q, plan)),
        plan=plan,
        rules=rules,
        interpret=interpret,
    )
    out = _tokens_by_head(out, plan)[:num_tokens]
    # f32[num_tiles, num_kv_heads, tile_tokens, group_size] -> f32[num_tokens, num_q_heads]
    lse = lse.reshape(-1, plan.num_kv_heads, plan.tile_tokens, plan.group_size)
    lse = lse.transpose(0, 2, 1, 3).reshape(-1, num_q_heads)[:num_tokens]

    # No pass contains padding, so its rows were never written.
    is_real = jnp.arange(num_tokens) < query_start_loc[-1]
    out = jnp.where(is_real[:, None, None], out, 0)
    lse = jnp.where(is_real[:, None], lse, -jnp.inf)
    return (out, lse) if sinks is None else _add_sinks(out, lse, sinks)


def misfit(
    q: jax.Array,
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    *args: object,
    **kwargs: object,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    del row, args
    if kwargs["alibi_slopes"] is not None:
        return ALIBI_MISFIT
    if "distance_factors" in kwargs:
        return DISTANCE_BIAS_MISFIT
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; it must be bfloat16 or float32"
    if kv_cache.dtype == jnp.uint16:
        return "kv_cache is uint16; 16-bit floats must be stored in their own dtype"
    if kv_cache.dtype == jnp.float16:
        return "kv_cache is float16, for which a TPU has no arithmetic"
    if kv_cache.shape[-1] % LANES:
        # XLA would lay such a cache out with the blocks innermost, and copy it for the kernel.
        return f"kv_cache has head_dim {kv_cache.shape[-1]}; it must be a multiple of {LANES}"
    if kv_cache.shape[3] % HBM_ROW_TILE:
        return f"block_size is {kv_cache.shape[3]}; it must be a multiple of {HBM_ROW_TILE}"
    plan = make_plan(q, kv_cache)
    num_bytes = scalar_bytes(plan, q, block_tables)
    if num_bytes > MAX_SCALAR_BYTES:
        return f"passes and tables need {num_bytes} bytes of SMEM, more than {MAX_SCALAR_BYTES}"
    num_bytes = scratch_bytes(plan, q, kv_cache)
    if num_bytes > MAX_SCRATCH_BYTES:
        return f"tiles would take {num_bytes} bytes of VMEM, more than {MAX_SCRATCH_BYTES}"
    return None


def _launch(
    *operands: jax.Array,
    plan: TilePlan,
    rules: AttentionRules,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on arguments in the order of `KernelRefs`."""
    passes, block_tables, kv_cache, q = operands[2:]
    num_kv_heads, num_rows, head_dim = q.shape
    num_tiles = num_rows // plan.tile_rows
    tile_spec = pl.BlockSpec(
        (num_kv_heads, plan.tile_rows, head_dim),
        lambda pass_idx, row, num, passes: (0, passes[PassField.TILE, pass_idx], 0),
    )
    lse_spec = pl.BlockSpec(
        (1, num_kv_heads, 1, plan.tile_rows),
        lambda pass_idx, row, num, passes: (passes[PassField.TILE, pass_idx], 0, 0, 0),
    )
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    rows = (num_kv_heads, plan.tile_rows)
    kv_tiles = (2, plan.tile_blocks, 2, num_kv_heads, plan.block_size, head_dim)
    return pl.pallas_call(
        functools.partial(attend_pass, plan=plan, rules=rules),
        out_shape=(
            jax.ShapeDtypeStruct((num_kv_heads, num_rows, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, 1, plan.tile_rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(passes.shape[1],),
            in_specs=[in_hbm, in_hbm, tile_spec],
            out_specs=(tile_spec, lse_spec),
            scratch_shapes=[
                pltpu.VMEM(kv_tiles, kv_cache.dtype),
                pltpu.SMEM((2, *block_tables.shape[1:]), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((*rows, head_dim), jnp.float32),
                pltpu.VMEM((*rows, LANES), jnp.float32),
                pltpu.VMEM((*rows, LANES), jnp.float32),
                pltpu.VMEM((*rows, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            # Steps run in order, because each uses KV tiles that the step before has fetched.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
        ),
        interpret=interpret,
        name="paged_attention_ragged",
    )(*operands)


def _whole_lanes(block_tables: jax.Array) -> jax.Array:  # i32[num_reqs, 1, max_blocks_per_req]
    """Pads a request's block table to one row of whole lanes, so that it can be copied alone."""
    padding = round_up(block_tables.shape[1], LANES) - block_tables.shape[1]
    return jnp.pad(block_tables, ((0, 0), (0, padding)))[:, None]


def _rows_by_kv_head(q: jax.Array, plan: TilePlan) -> jax.Array:
    """f[num_kv_heads, num_tiles * tile_rows, head_dim], the rows of a token next to each other."""
    num_tokens, _, head_dim = q.shape
    padding = round_up(num_tokens, plan.tile_tokens) - num_tokens
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    q = q.reshape(-1, plan.num_kv_heads, plan.group_size, head_dim)
    return q.transpose(1, 0, 2, 3).reshape(plan.num_kv_heads, -1, head_dim)


def _tokens_by_head(rows: jax.Array, plan: TilePlan) -> jax.Array:
    """The inverse of `_rows_by_kv_head`: f[num_tokens, num_q_heads, head_dim], padded."""
    head_dim = rows.shape[-1]
    rows = rows.reshape(plan.num_kv_heads, -1, plan.group_size, head_dim)
    return rows.transpose(1, 0, 2, 3).reshape(-1, plan.num_kv_heads * plan.group_size, head_dim)


def _add_sinks(
    out: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    lse: jax.Array,  # f32[num_tokens, num_q_heads]
    sinks: jax.Array,  # f32[num_q_heads]
) -> tuple[jax.Array, jax.Array]:
    """Adds one more logit per head to finished softmaxes."""
    with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    sees_any = lse > -jnp.inf
    share = jnp.where(sees_any, jnp.exp(lse - with_sink), 0.0)
    out = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    return out, jnp.where(sees_any, with_sink, -jnp.inf)
