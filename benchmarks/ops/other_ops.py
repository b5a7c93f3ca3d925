"""Checks and timings of the other ops on a GPU, over the cases of `pallas_kernels`.

Every result is checked before it is timed: computed results against float64 in NumPy, and ops that
only move data against their reference body.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.ops.device_calls import MeasuredOp, Problem, Work
from benchmarks.ops.findings import ERROR_LIMITS, close_findings, same_finding
from benchmarks.ops.float64 import SeenRule, attend_requests, merge
from benchmarks.units.unit import Finding
from pallas_kernels.block_copy import cases as block_copy_cases
from pallas_kernels.block_gather import cases as block_gather_cases
from pallas_kernels.grouped_matmul import cases as grouped_matmul_cases
from pallas_kernels.kv_scatter import cases as kv_scatter_cases
from pallas_kernels.latent_attention import cases as latent_cases
from pallas_kernels.merge_attention_states import cases as merge_cases
from pallas_kernels.number_format import NumberFormat, has_pairs
from pallas_kernels.scaled_grouped_matmul import cases as scaled_grouped_cases
from pallas_kernels.scaled_matmul import cases as scaled_matmul_cases
from pallas_kernels.slot_mapping import cases as slot_mapping_cases


def _with_half_precision(cases: Sequence[Any]) -> list[Any]:
    """The cases, and copies of the float32 cases in bfloat16, which the Mosaic bodies support."""
    in_half = [
        dataclasses.replace(case, name=f"{case.name}, bfloat16", dtype="bfloat16")
        for case in cases
        if case.dtype == "float32"
    ]
    return [*cases, *in_half]


def _latent_attention(case: latent_cases.LatentAttentionCase, seed: int) -> Problem:
    drawn = latent_cases.build_inputs(case, seed)
    arrays = list(drawn.arrays)
    arrays[3] = jnp.asarray(drawn.row, jnp.int32)

    def verify(out: jax.Array) -> list[Finding]:
        keys = [cached[:, None] for cached in drawn.cached_np]
        values = [k[..., : case.latent_dim] for k in keys]
        rule = SeenRule(scale=case.scale)
        wanted, _ = attend_requests(drawn.q_np, case.requests, keys, values, rule)
        return close_findings("out", np.asarray(out), wanted, ERROR_LIMITS[case.dtype])

    return Problem(
        arrays=tuple(arrays),
        rules=drawn.rules,
        verify=verify,
        is_exact=case.dtype == "float32",
    )


def _kv_scatter(case: kv_scatter_cases.KVScatterCase, _: int) -> Problem:
    drawn = kv_scatter_cases.build_inputs(case)  # with the case's own seed, like the ops below
    *arrays, row = drawn.arguments
    arrays.append(jnp.asarray(row, jnp.int32))
    return _same_as_reference("kv_scatter", *arrays, updates_first=True)


def _block_copy(case: block_copy_cases.BlockCopyCase, _: int) -> Problem:
    drawn = block_copy_cases.build_inputs(case)
    ids = (drawn.source_block_ids, drawn.target_block_ids)
    return _same_as_reference("block_copy", drawn.pages, *ids, updates_first=True)


def _block_gather(case: block_gather_cases.BlockGatherCase, _: int) -> Problem:
    drawn = block_gather_cases.build_inputs(case)
    return _same_as_reference("block_gather", drawn.pages, drawn.block_ids)


def _block_scatter(case: block_gather_cases.BlockGatherCase, _: int) -> Problem:
    drawn = block_gather_cases.build_inputs(case)
    arrays = (drawn.pages, drawn.values, drawn.block_ids)
    return _same_as_reference("block_scatter", *arrays, updates_first=True)


def _slot_mapping(case: slot_mapping_cases.SlotMappingCase, _: int) -> Problem:
    drawn = slot_mapping_cases.build_inputs(case)
    return _same_as_reference("slot_mapping", *drawn.arrays, rules=drawn.options)


def _same_as_reference(
    op: str,
    *arrays: jax.Array | None,
    rules: Mapping[str, int] = {},
    updates_first: bool = False,
) -> Problem:
    """A call that only moves data and must return the same bits as the reference on the CPU."""
    cpu = jax.devices("cpu")[0]
    function = functools.partial(getattr(pallas_kernels, op), **rules, implementation="reference")
    outputs = jax.jit(function)(*jax.device_put(arrays, cpu))
    wanted = [np.array(output) for output in jax.tree.leaves(outputs)]

    def verify(outputs: Any) -> list[Finding]:
        pairs = zip(jax.tree.leaves(outputs), wanted, strict=True)
        return [
            same_finding(f"output {idx}", np.asarray(output), expected)
            for idx, (output, expected) in enumerate(pairs)
        ]

    return Problem(arrays=arrays, rules=rules, verify=verify, updates_first=updates_first)


def _merge(case: merge_cases.MergeAttentionStatesCase, seed: int) -> Problem:
    drawn = merge_cases.build_inputs(case, seed)

    def verify(state: Any) -> list[Finding]:
        out_np, lse_np = map(np.asarray, state)
        outs, lses = (
            np.stack([np.asarray(x, np.float64) for x in pair])
            for pair in ((drawn.out_a, drawn.out_b), (drawn.lse_a, drawn.lse_b))
        )
        wanted_out, wanted_lse = merge(outs, lses)
        sees_any = np.isfinite(wanted_lse)
        limit = ERROR_LIMITS["float32"]
        wanted_nothing = np.float32(wanted_lse[~sees_any])
        return [
            *close_findings("out", out_np, wanted_out, ERROR_LIMITS[case.dtype]),
            *close_findings("lse", lse_np[sees_any], wanted_lse[sees_any], limit),
            same_finding("lse of nothing", lse_np[~sees_any], wanted_nothing),
        ]

    return Problem(arrays=drawn.arrays, verify=verify)


def _grouped_matmul(case: grouped_matmul_cases.GroupedMatmulCase, seed: int) -> Problem:
    return _problem_of_groups(case.dtype, grouped_matmul_cases.build_inputs(case, seed))


def _scaled_grouped_matmul(
    case: scaled_grouped_cases.ScaledGroupedMatmulCase, seed: int
) -> Problem:
    return _problem_of_groups(case.dtype, scaled_grouped_cases.build_inputs(case, seed))


def _problem_of_groups(
    dtype: str,
    drawn: grouped_matmul_cases.GroupedMatmulInputs
    | scaled_grouped_cases.ScaledGroupedMatmulInputs,
) -> Problem:
    group_ids_np, places_np = np.asarray(drawn.group_ids), np.asarray(drawn.tiles.places)
    weights = drawn.weights
    if drawn.weights_dtype is not None:
        weights = jax.lax.bitcast_convert_type(weights, drawn.weights_dtype)

    def verify(out: jax.Array) -> list[Finding]:
        rows_np, wanted, places = np.asarray(drawn.rows), [], []
        for group_idx, weight in enumerate(weights):
            own = np.flatnonzero(group_ids_np == group_idx)
            if own.size:
                wanted.append(rows_np[own].astype(np.float64) @ np.asarray(weight, np.float64))
                places.append(places_np[own])
        got_np = np.asarray(out)[np.concatenate(places)]
        return close_findings("out", got_np, np.concatenate(wanted), ERROR_LIMITS[dtype])

    return Problem(
        arrays=drawn.arrays,
        rules=drawn.options,
        verify=verify,
        is_exact=dtype == "float32",
    )


def _scaled_matmul(case: scaled_matmul_cases.ScaledMatmulCase, seed: int) -> Problem:
    drawn = scaled_matmul_cases.build_inputs(case, seed)

    def verify(out: jax.Array) -> list[Finding]:
        wanted = np.asarray(drawn.x, np.float64) @ drawn.weights_np
        return close_findings("out", np.asarray(out), wanted, ERROR_LIMITS[case.dtype])

    return Problem(
        arrays=drawn.arrays,
        rules=drawn.options,
        verify=verify,
        is_exact=case.dtype == "float32",
    )


_HEADS = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
_BLOCKS = {
    **{"num_rows": 8, "num_blocks": 512},
    **{"block_dims": (2, 8, 16, 128), "dtype": "bfloat16"},  # K and V of 8 heads, 16 tokens
}
# K and V of 8 heads of 128, read once and written once.
_TOKEN_BYTES = 2 * 2 * 8 * 128 * 2
_BLOCK_WORK = Work(num_bytes=256 * 8 * 16 * _TOKEN_BYTES)
_COPIED = block_copy_cases.BlockCopyCase(name="256 of 512", copies=256, **_BLOCKS)
_GATHERED = block_gather_cases.BlockGatherCase(name="256 of 512", num_ids=256, **_BLOCKS)
_SLOTS = slot_mapping_cases.SlotMappingCase(
    name="8,192 tokens of 32 requests", requests=((1000, 256),) * 32, max_blocks_per_req=512
)
_MERGED = merge_cases.MergeAttentionStatesCase(
    name="8,192 tokens", num_tokens=8192, num_q_heads=32, v_head_dim=128, dtype="bfloat16"
)


def _large_scatter(num_tokens: int) -> tuple[kv_scatter_cases.KVScatterCase, Work]:
    sizes = {"num_tokens": num_tokens, "num_padding_tokens": 0, "num_blocks": 1024}
    case = kv_scatter_cases.KVScatterCase(name=f"{num_tokens:,} tokens", **sizes, **_HEADS)
    return case, Work(num_bytes=num_tokens * _TOKEN_BYTES)


def _large_latents(
    num_q_heads: int, block_size: int
) -> tuple[latent_cases.LatentAttentionCase, Work]:
    case = latent_cases.LatentAttentionCase(
        name=f"16x8,192, {num_q_heads} heads, block {block_size}",
        requests=((1, 8192),) * 16,
        num_padding_tokens=0,
        num_q_heads=num_q_heads,
        latent_dim=512,
        rope_dim=64,
        block_size=block_size,
        dtype="bfloat16",
        scale=192**-0.5,
    )
    # Each latent is read once for all heads. Queries are read and outputs are written.
    return case, Work(
        num_bytes=2 * 16 * (8192 * 576 + num_q_heads * (576 + 512)),
        num_flops=2 * 16 * 8192 * num_q_heads * (2 * 512 + 64),
    )


def _large_experts(
    num_rows: int, tile_rows: int
) -> tuple[grouped_matmul_cases.GroupedMatmulCase, Work]:
    """The same number of rows for each of 128 experts of Qwen3-30B-A3B."""
    case = grouped_matmul_cases.GroupedMatmulCase(
        name=f"{num_rows:,} rows of 128 groups",
        group_sizes=(num_rows // 128,) * 128,
        tile_rows=tile_rows,
        in_features=2048,
        out_features=768,
        dtype="bfloat16",
    )
    # Every matrix is read once. Rows are read and written.
    num_numbers = 128 * 2048 * 768 + num_rows * (2048 + 768)
    return case, Work(num_bytes=2 * num_numbers, num_flops=2 * num_rows * 2048 * 768)


def _large_scaled(
    number_format: NumberFormat, num_rows: int, out_features: int
) -> tuple[scaled_matmul_cases.ScaledMatmulCase, Work]:
    """A matrix with 4,096 inputs in groups of 128."""
    case = scaled_matmul_cases.ScaledMatmulCase(
        name=f"{number_format}, {num_rows} rows, 4,096 x {out_features:,}",
        number_format=number_format,
        num_rows=num_rows,
        num_groups=32,
        group_size=128,
        out_features=out_features,
        dtype="bfloat16",
    )
    # Numbers and scales are read once. Rows are read in bfloat16 and written in float32.
    num_stored = 4096 * out_features // (2 if has_pairs(number_format) else 1)
    rows = num_rows * (2 * 4096 + 4 * out_features)
    return case, Work(
        num_bytes=num_stored + 4 * 32 * out_features + rows,
        num_flops=2 * num_rows * 4096 * out_features,
    )


def _large_scaled_experts(
    number_format: NumberFormat, num_rows: int, tile_rows: int
) -> tuple[scaled_grouped_cases.ScaledGroupedMatmulCase, Work]:
    """The same number of rows for each of 32 experts of 2,048 x 2,048, in groups of 128."""
    large, _ = _large_scaled(number_format, num_rows, 2048)
    matrix = dataclasses.replace(large, num_groups=16)
    case = scaled_grouped_cases.ScaledGroupedMatmulCase(
        name=f"{number_format}, {num_rows:,} rows of 32 experts",
        expert_sizes=(num_rows // 32,) * 32,
        tile_rows=tile_rows,
        matrix=matrix,
    )
    # Numbers and scales of every expert are read once. Rows are read and written in bfloat16.
    num_stored = 2048 * 2048 // (2 if has_pairs(number_format) else 1)
    return case, Work(
        num_bytes=32 * (num_stored + 4 * 16 * 2048) + num_rows * 2 * (2048 + 2048),
        num_flops=2 * num_rows * 2048 * 2048,
    )


_HALF_BLOCKS = _with_half_precision(block_gather_cases.CASES)
# Op -> the function that makes a call, cases to check, and cases to time with their work.
_OPS: dict[str, tuple[Callable[..., Problem], Sequence[Any], Sequence[tuple[Any, Work]]]] = {
    "latent_attention": (
        _latent_attention,
        _with_half_precision(latent_cases.CASES),
        [_large_latents(16, 16), _large_latents(128, 16), _large_latents(16, 64)],
    ),
    "kv_scatter": (
        _kv_scatter,
        _with_half_precision(kv_scatter_cases.CASES),
        [_large_scatter(8192), _large_scatter(256)],
    ),
    "block_copy": (
        _block_copy,
        _with_half_precision(block_copy_cases.CASES),
        [(_COPIED, _BLOCK_WORK)],
    ),
    "block_gather": (_block_gather, _HALF_BLOCKS, [(_GATHERED, _BLOCK_WORK)]),
    "block_scatter": (_block_scatter, _HALF_BLOCKS, [(_GATHERED, _BLOCK_WORK)]),
    # Positions in and slots out, block tables and query starts, all int32.
    "slot_mapping": (
        _slot_mapping,
        slot_mapping_cases.CASES,
        [(_SLOTS, Work(num_bytes=4 * (2 * 8192 + 32 * 512 + 33)))],
    ),
    "grouped_matmul": (
        _grouped_matmul,
        _with_half_precision(
            [case for case in grouped_matmul_cases.CASES if any(case.group_sizes)]
        ),
        [_large_experts(512, 8), _large_experts(4096, 64)],
    ),
    "scaled_matmul": (
        _scaled_matmul,
        scaled_matmul_cases.CASES,
        [
            _large_scaled("int4", 16, 4096),
            _large_scaled("int4", 64, 4096),
            _large_scaled("int8", 16, 4096),
            _large_scaled("e4m3", 16, 4096),
            _large_scaled("int4", 16, 128_256),
        ],
    ),
    "scaled_grouped_matmul": (
        _scaled_grouped_matmul,
        [case for case in scaled_grouped_cases.CASES if any(case.expert_sizes)],
        [_large_scaled_experts("int4", 256, 16), _large_scaled_experts("e4m3", 2048, 64)],
    ),
    # Two states in and one out: outputs in bfloat16, log-sum-exps in float32.
    "merge_attention_states": (
        _merge,
        merge_cases.CASES,
        [(_MERGED, Work(num_bytes=3 * 8192 * 32 * (2 * 128 + 4)))],
    ),
}
OTHER_OPS = [
    MeasuredOp(op=op, problem=problem, cases=cases, timed=timed)
    for op, (problem, cases, timed) in _OPS.items()
]
