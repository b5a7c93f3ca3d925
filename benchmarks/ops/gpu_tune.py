"""Timings of the attention kernels with other block configurations than the chosen ones.

What is tried is what `tuned_blocks.py` and `ragged_tiles.py` can say. A better one found here goes
there, with the device, the JAX version and the command.
"""

import dataclasses

import jax

from benchmarks.ops.gpu_attention_speed import DECODE, RAGGED, AttentionSizes, attention_timing
from benchmarks.ops.gpu_units import Unit
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_rows_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu_ragged import ragged_rows_mosaic_gpu
from pallas_kernels.paged_attention.ragged_tiles import (
    SMEM_BYTES,
    RaggedConfig,
    default_ragged_config,
)
from pallas_kernels.paged_attention.tuned_blocks import DecodeConfig, decode_config

_ITEMSIZE = 2
# 64 x 8,192 and 8 x 32,768 with blocks of 16; the prompt.
_TUNED_DECODES = (DECODE[0], DECODE[2])
_TUNED_PROMPT = RAGGED[0]
# (stages, CTAs an SM, fewest tiles a share)
_DECODE_SIZES = ((3, 2, 4), (2, 2, 4), (3, 2, 1), (3, 2, 8), (4, 1, 4), (6, 1, 4))


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Each configuration is a body of its own; what does not fit shared memory is left out.

    A rehearsal has none: on a CPU the kernels are interpreted, which takes seconds a call.
    """
    if is_rehearsal:
        return []
    decodes = [
        _decode_unit(sizes, config) for sizes in _TUNED_DECODES for config in _decode_configs()
    ]
    return decodes + [_ragged_unit(config) for config in _ragged_configs()]


def _decode_configs() -> list[DecodeConfig]:
    sizes = DECODE[0]
    group_size = sizes.num_q_heads // sizes.num_kv_heads
    dims = (sizes.head_dim, sizes.head_dim, group_size)
    # The device is named: to ask which one is here would take it, for the process that only lists.
    chosen = decode_config(sizes.dtype, *dims, device_kind="NVIDIA H200")
    configs = [
        dataclasses.replace(
            chosen, num_stages=num_stages, ctas_per_sm=ctas_per_sm, min_share=min_share
        )
        for num_stages, ctas_per_sm, min_share in _DECODE_SIZES
    ]
    return [
        config
        for config in configs
        if config.ctas_per_sm * config.smem_bytes(_ITEMSIZE, *dims) <= SMEM_BYTES
    ]


def _ragged_configs() -> list[RaggedConfig]:
    sizes = _TUNED_PROMPT
    group_size = sizes.num_q_heads // sizes.num_kv_heads
    chosen = default_ragged_config(
        head_dim=sizes.head_dim, group_size=group_size, itemsize=_ITEMSIZE
    )
    configs = [chosen] + [
        RaggedConfig(heads_per_tile=heads_per_tile, kv_tile=kv_tile, num_stages=num_stages)
        for kv_tile, num_stages in ((128, 2), (64, 2), (64, 4))
        for heads_per_tile in (1, 2, 4)
        if group_size % heads_per_tile == 0
    ]
    fitting = [c for c in configs if c.smem_bytes(sizes.head_dim, _ITEMSIZE) <= SMEM_BYTES - 2048]
    return list(dict.fromkeys(fitting))


def _decode_unit(sizes: AttentionSizes, config: DecodeConfig) -> Unit:
    def attention(
        q: jax.Array,
        k_cache: jax.Array,
        v_cache: jax.Array,
        row: jax.Array,
        block_tables: jax.Array,
        seq_lens: jax.Array,
        query_start_loc: jax.Array,
        *,
        scale: float,
        **unused: object,
    ) -> jax.Array:
        del query_start_loc, unused
        out, _ = decode_rows_mosaic_gpu(
            *(q, k_cache, v_cache, row, block_tables, seq_lens),
            scale=scale,
            sliding_window=None,
            chunk_size=None,
            soft_cap=None,
            config=config,
        )
        return out.astype(q.dtype)

    body = (
        f"mosaic_gpu stages={config.num_stages} ctas={config.ctas_per_sm} "
        f"min_share={config.min_share}"
    )
    return attention_timing(sizes, body, is_rehearsal=False, attention=attention)


def _ragged_unit(config: RaggedConfig) -> Unit:
    def attention(*arrays: jax.Array, scale: float, **unused: object) -> jax.Array:
        del unused
        out, _ = ragged_rows_mosaic_gpu(
            *arrays,
            scale=scale,
            is_causal=True,
            sliding_window=None,
            chunk_size=None,
            soft_cap=None,
            skip_single=True,
            config=config,
        )
        return out

    body = (
        f"mosaic_gpu heads={config.heads_per_tile} kv_tile={config.kv_tile} "
        f"stages={config.num_stages}"
    )
    return attention_timing(_TUNED_PROMPT, body, is_rehearsal=False, attention=attention)
