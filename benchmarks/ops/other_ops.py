"""Checks and timings of the other ops on a GPU, over the cases of `pallas_kernels`.

Every result is compared with NumPy, in a check and before a timing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.ops.device_calls import Work, implementation_of, measure_calls
from benchmarks.ops.findings import (
    ERROR_LIMITS,
    close_findings,
    relative_error,
    same_finding,
)
from benchmarks.ops.float64 import SeenRule, attend, merge
from benchmarks.units.unit import Finding, Measured, Unit
from pallas_kernels.block_copy import cases as block_copy_cases
from pallas_kernels.block_gather import cases as block_gather_cases
from pallas_kernels.kv_scatter import cases as kv_scatter_cases
from pallas_kernels.merge_attention_states import cases as merge_cases
from pallas_kernels.mla_decode import cases as mla_cases
from pallas_kernels.quantised_cache import LARGEST_STORED
from pallas_kernels.slot_mapping import cases as slot_mapping_cases

# A quantised number may be rounded the other way where x / scale lies close to the middle.
_QUANTISED_LIMIT = 1e-2


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Checks of every case and timings of the large ones, of every op with every body."""
    bodies = ("xla", "mosaic_gpu_interpret") if is_rehearsal else ("mosaic_gpu", "xla", "default")
    found = []
    for op, (measure, cases, timed) in _OPS.items():
        for body in bodies:
            # "default" chooses one of the other bodies: one case shows that it can choose.
            checked = cases[:1] if body == "default" or is_rehearsal else cases
            found += [_unit("check", op, case, body, measure, None) for case in checked]
            if is_rehearsal and body == "xla":
                found.append(_unit("time", op, cases[0], body, measure, timed[0][1]))
            elif not is_rehearsal and body != "default":
                found += [_unit("time", op, case, body, measure, work) for case, work in timed]
    return found


def _unit(
    kind: Literal["check", "time"],
    op: str,
    case: Any,
    body: str,
    measure: Callable[[Any, str, int, Work | None], Measured],
    work: Work | None,
) -> Unit:
    return Unit(
        kind=kind,
        op=op,
        case=case.name,
        body=body,
        measure=lambda seed: measure(case, body, seed, work),
        silence_limit_s=150.0 if kind == "time" else 90.0,  # large inputs are drawn by NumPy
    )


def _with_half_precision(cases: Sequence[Any]) -> list[Any]:
    """The cases, and those in float32 again in bfloat16, which the Mosaic bodies take."""
    return [
        *cases,
        *(
            dataclasses.replace(case, name=f"{case.name}, bfloat16", dtype="bfloat16")
            for case in cases
            if case.dtype == "float32"
        ),
    ]


def _mla_decode(case: mla_cases.MLADecodeCase, body: str, seed: int, work: Work | None) -> Measured:
    drawn = mla_cases.build_inputs(case, seed)
    arrays = list(drawn.arrays)
    arrays[2] = jnp.asarray(drawn.row, jnp.int32)

    def call(*arrays: jax.Array) -> jax.Array:
        return pallas_kernels.mla_decode(
            *arrays, **drawn.rules, implementation=implementation_of(body)
        )

    def verify(out: jax.Array) -> list[Finding]:
        wanted = np.zeros(out.shape)
        starts = np.asarray(drawn.query_start_loc)
        for req_idx, (num_query, seq_len) in enumerate(case.requests):
            if num_query:
                token = slice(starts[req_idx], starts[req_idx] + 1)
                latents = drawn.latents_np[req_idx][:, None]
                wanted[token] = attend(
                    np.asarray(drawn.q)[token],
                    latents,
                    latents[..., : case.latent_dim],
                    np.array([seq_len - 1]),
                    SeenRule(scale=case.scale),
                )[0]
        return close_findings("out", np.asarray(out), wanted, ERROR_LIMITS[case.dtype])

    return measure_calls(call, tuple(arrays), verify, work=work, exact=case.dtype == "float32")


def _kv_scatter(
    case: kv_scatter_cases.KVScatterCase, body: str, seed: int, work: Work | None
) -> Measured:
    del seed  # the cases draw from one of their own
    drawn = kv_scatter_cases.build_inputs(case)
    before = [np.array(x) for x in (drawn.k_cache, drawn.v_cache)]

    def call(k_cache: jax.Array, v_cache: jax.Array, *others: jax.Array) -> Any:
        *arrays, row, scales = others
        return pallas_kernels.kv_scatter(
            *(k_cache, v_cache, *arrays, row), implementation=implementation_of(body), **scales
        )

    def verify(caches: Any) -> list[Finding]:
        findings = []
        slots = np.asarray(drawn.slots)
        is_real = slots < case.num_blocks * case.block_size
        block_ids, offsets = np.divmod(slots[is_real], case.block_size)
        for name, got, wanted in zip(("k", "v"), caches, before, strict=True):
            new = np.asarray(getattr(drawn, name))[is_real]
            scale = drawn.scales[f"{name}_scale"]
            if scale is not None:
                largest = LARGEST_STORED[case.dtype]
                scaled = new.astype(np.float64) / np.asarray(scale)[:, None]
                scaled = np.clip(scaled, -largest, largest)
                # Through float32: ml_dtypes rounds float64 to float8 directly, JAX from float32.
                new = (np.rint(scaled) if case.dtype == "int8" else scaled).astype(np.float32)
            wanted[case.row, block_ids, :, offsets] = new.astype(wanted.dtype)
            if scale is None:
                findings.append(same_finding(f"{name} cache", np.asarray(got), wanted))
            else:
                error = relative_error(np.asarray(got), wanted.astype(np.float64))
                findings.append(Finding(what=f"{name} cache", error=error, limit=_QUANTISED_LIMIT))
        return findings

    k_cache, v_cache, k, v, slots, _ = drawn.arguments
    arrays = (k_cache, v_cache, k, v, slots, jnp.asarray(drawn.row, jnp.int32), drawn.scales)
    return measure_calls(call, arrays, verify, work=work, num_updated=2)


def _block_copy(
    case: block_copy_cases.BlockCopyCase, body: str, seed: int, work: Work | None
) -> Measured:
    del seed
    drawn = block_copy_cases.build_inputs(case)
    sources, targets = (np.asarray(x) for x in (drawn.source_block_ids, drawn.target_block_ids))
    is_real = targets < case.num_blocks
    wanted = [np.array(x) for x in (drawn.k_cache, drawn.v_cache)]
    for cache in wanted:
        cache[:, targets[is_real]] = cache[:, sources[is_real]]
    arrays = (drawn.k_cache, drawn.v_cache, drawn.source_block_ids, drawn.target_block_ids)
    return _same("block_copy", body, arrays, wanted, work, num_updated=2)


def _block_gather(
    case: block_gather_cases.BlockGatherCase, body: str, seed: int, work: Work | None
) -> Measured:
    del seed
    drawn = block_gather_cases.build_inputs(case)
    ids = np.asarray(drawn.block_ids)
    wanted = []
    for cache in (drawn.k_cache, drawn.v_cache):
        blocks = np.asarray(cache)[:, np.minimum(ids, case.num_blocks - 1)]
        blocks[:, ids >= case.num_blocks] = 0
        wanted.append(blocks)
    arrays = (drawn.k_cache, drawn.v_cache, drawn.block_ids)
    return _same("block_gather", body, arrays, wanted, work)


def _block_scatter(
    case: block_gather_cases.BlockGatherCase, body: str, seed: int, work: Work | None
) -> Measured:
    del seed
    drawn = block_gather_cases.build_inputs(case)
    ids = np.asarray(drawn.block_ids)
    is_real = ids < case.num_blocks
    wanted = [np.array(x) for x in (drawn.k_cache, drawn.v_cache)]
    for cache, blocks in zip(wanted, (drawn.k_blocks, drawn.v_blocks), strict=True):
        cache[:, ids[is_real]] = np.asarray(blocks)[:, is_real]
    arrays = (drawn.k_cache, drawn.v_cache, drawn.k_blocks, drawn.v_blocks, drawn.block_ids)
    return _same("block_scatter", body, arrays, wanted, work, num_updated=2)


def _same(
    op: str,
    body: str,
    arrays: tuple[jax.Array, ...],
    wanted: Sequence[np.ndarray],
    work: Work | None,
    num_updated: int = 0,
) -> Measured:
    """Compares the two outputs of an op on whole blocks, bit by bit."""

    def call(*arrays: jax.Array) -> Any:
        return getattr(pallas_kernels, op)(*arrays, implementation=implementation_of(body))

    def verify(outputs: Any) -> list[Finding]:
        pairs = zip(("k", "v"), outputs, wanted, strict=True)
        return [same_finding(name, np.asarray(got), expected) for name, got, expected in pairs]

    return measure_calls(call, arrays, verify, work=work, num_updated=num_updated)


def _slot_mapping(
    case: slot_mapping_cases.SlotMappingCase, body: str, seed: int, work: Work | None
) -> Measured:
    del seed
    drawn = slot_mapping_cases.build_inputs(case)

    def call(*arrays: jax.Array) -> jax.Array:
        return pallas_kernels.slot_mapping(
            *arrays, **drawn.options, implementation=implementation_of(body)
        )

    def verify(slots: jax.Array) -> list[Finding]:
        wanted = expected_slots(*drawn.arrays, **drawn.options)
        return [same_finding("slots", np.asarray(slots), wanted)]

    return measure_calls(call, drawn.arrays, verify, work=work)


def expected_slots(
    positions: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    *,
    block_size: int,
    pad_slot: int,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> np.ndarray:
    """Slots of `slot_mapping`, computed token by token."""
    positions, block_tables = np.asarray(positions), np.asarray(block_tables)
    wanted = np.full(positions.shape, pad_slot, np.int32)
    for req_idx, (start, end) in enumerate(zip(query_start_loc, query_start_loc[1:], strict=False)):
        for group in range(len(positions)):
            for token_idx in range(int(start), int(end)):
                position = int(positions[group, token_idx])
                block_idx, within = divmod(position, block_size * cp_world_size)
                turn, place = divmod(within, cp_world_size * cp_interleave)
                if place // cp_interleave == cp_rank:
                    offset = turn * cp_interleave + place % cp_interleave
                    block_id = int(block_tables[group, req_idx, block_idx])
                    wanted[group, token_idx] = block_id * block_size + offset
    return wanted


def _merge(
    case: merge_cases.MergeAttentionStatesCase, body: str, seed: int, work: Work | None
) -> Measured:
    drawn = merge_cases.build_inputs(case, seed)

    def call(*arrays: jax.Array) -> Any:
        return pallas_kernels.merge_attention_states(
            *arrays, implementation=implementation_of(body)
        )

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

    return measure_calls(call, drawn.arrays, verify, work=work)


# Large cases, in bfloat16.
_HEADS = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "dtype": "bfloat16"}
_BLOCKS = {**_HEADS, "num_rows": 8, "num_blocks": 512, "block_size": 16}
# K and V of 8 heads of 128, read once and written once.
_TOKEN_BYTES = 2 * 2 * 8 * 128 * 2
_MLA_TIMED = [
    (
        mla_cases.MLADecodeCase(
            name=f"16x8,192, {num_q_heads} heads, block {block_size}",
            requests=((1, 8192),) * 16,
            num_padding_tokens=0,
            num_q_heads=num_q_heads,
            latent_dim=512,
            rope_dim=64,
            block_size=block_size,
            dtype="bfloat16",
            scale=192**-0.5,
        ),
        # Latents once for all heads; queries and outputs.
        Work(
            num_bytes=2 * 16 * (8192 * 576 + num_q_heads * (576 + 512)),
            num_flops=2 * 16 * 8192 * num_q_heads * (2 * 512 + 64),
        ),
    )
    for num_q_heads, block_size in ((16, 16), (128, 16), (16, 64))
]
_SCATTER_TIMED = [
    (
        kv_scatter_cases.KVScatterCase(
            name=f"{num_tokens:,} tokens",
            num_tokens=num_tokens,
            num_padding_tokens=0,
            num_blocks=1024,
            **_HEADS,
        ),
        Work(num_bytes=num_tokens * _TOKEN_BYTES),
    )
    for num_tokens in (8192, 256)
]
_BLOCK_WORK = Work(num_bytes=256 * 8 * 16 * _TOKEN_BYTES)
_COPY_TIMED = [
    (block_copy_cases.BlockCopyCase(name="256 of 512", copies=256, **_BLOCKS), _BLOCK_WORK)
]
_GATHER_TIMED = [
    (block_gather_cases.BlockGatherCase(name="256 of 512", num_ids=256, **_BLOCKS), _BLOCK_WORK)
]
_SLOTS_TIMED = [
    (
        slot_mapping_cases.SlotMappingCase(
            name="8,192 tokens of 32 requests",
            requests=((1000, 256),) * 32,
            max_blocks_per_req=512,
        ),
        # Positions in and slots out, block tables and query starts, all int32.
        Work(num_bytes=4 * (2 * 8192 + 32 * 512 + 33)),
    )
]
_MERGE_TIMED = [
    (
        merge_cases.MergeAttentionStatesCase(
            name="8,192 tokens",
            num_tokens=8192,
            num_q_heads=32,
            v_head_dim=128,
            dtype="bfloat16",
        ),
        # Two states in and one out: outputs in bfloat16, log-sum-exps in float32.
        Work(num_bytes=3 * 8192 * 32 * (2 * 128 + 4)),
    )
]
# Op -> how it is measured, the cases that are checked, and those that are timed with their work.
_OPS: dict[str, tuple[Callable[..., Measured], Sequence[Any], Sequence[tuple[Any, Work]]]] = {
    "mla_decode": (_mla_decode, _with_half_precision(mla_cases.CASES), _MLA_TIMED),
    "kv_scatter": (_kv_scatter, _with_half_precision(kv_scatter_cases.CASES), _SCATTER_TIMED),
    "block_copy": (_block_copy, _with_half_precision(block_copy_cases.CASES), _COPY_TIMED),
    "block_gather": (_block_gather, _with_half_precision(block_gather_cases.CASES), _GATHER_TIMED),
    "block_scatter": (
        _block_scatter,
        _with_half_precision(block_gather_cases.CASES),
        _GATHER_TIMED,
    ),
    "slot_mapping": (_slot_mapping, slot_mapping_cases.CASES, _SLOTS_TIMED),
    "merge_attention_states": (_merge, merge_cases.CASES, _MERGE_TIMED),
}
