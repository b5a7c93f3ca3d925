"""Checks of `paged_attention` on a GPU: every feature, in small random batches, against float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.ops.device_calls import Problem
from benchmarks.ops.findings import ERROR_LIMITS, close_findings, same_finding
from benchmarks.ops.float64 import SeenRule, attend_requests
from benchmarks.units.unit import Finding
from pallas_kernels.paged_attention.cases import (
    CASES,
    PagedAttentionCase,
    PagedAttentionInputs,
    build_inputs,
)

# (query tokens, seq_len) of each request.
_DECODE = ((1, 5), (1, 16), (0, 0), (1, 333), (1, 1), (1, 1025), (1, 64), (1, 2000))
_PREFILL = ((300, 300), (37, 700), (64, 64), (5, 1029), (0, 0), (129, 129))
_MIXED = ((1, 700), (200, 456), (1, 1), (0, 0), (1, 1500), (130, 130), (3, 3), (1, 65))
_LLAMA = {"num_q_heads": 32, "num_kv_heads": 8}
_LONG = {"num_q_heads": 4, "num_kv_heads": 1, "num_rows": 1, "row": 0}
# (head_dim, block_size, num_q_heads, num_kv_heads); with `_DECODED_HEAD_DIMS`, every head size that
# the Mosaic GPU kernels take in 16 bits.
_SHAPES = (
    *((128, block_size, 8, 2) for block_size in (8, 16, 32, 64, 128, 256)),
    *((64, 16, 8, 8), (64, 64, 16, 1), (80, 8, 4, 4), (96, 16, 6, 2)),
    *((192, 32, 8, 2), (256, 16, 8, 4), (256, 64, 4, 1)),
    # A block of 16 is a quarter of a tile. This width allows at most 16 query heads per KV head.
    *((512, 16, 8, 4), (512, 64, 16, 1)),
)
# Head sizes of the decode kernel alone.
_DECODED_HEAD_DIMS = (16, 32, 48, 112, 144, 160, 176, 208, 224, 240, 320, 384, 448)
_DECODED_SHAPES = tuple((head_dim, 16, 8, 2) for head_dim in _DECODED_HEAD_DIMS)
_FEATURES: dict[str, dict[str, Any]] = {
    "32/8 heads": _LLAMA,
    "window 100": {"sliding_window": 100},
    "window 1": {"sliding_window": 1},
    "chunks of 192": {"chunk_size": 192},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"has_sinks": True},
    "custom scale": {"scale": 0.2},
    "not causal": {"is_causal": False},
    "window, soft cap, sinks, d256": {
        "head_dim": 256,
        "sliding_window": 200,
        "soft_cap": 20.0,
        "has_sinks": True,
    },
}


def _case(name: str, requests: tuple[tuple[int, int], ...], **sizes: Any) -> PagedAttentionCase:
    defaults = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return PagedAttentionCase(name=name, requests=requests, **(defaults | sizes))


def _feature_cases(
    kind: str,
    requests: tuple[tuple[int, int], ...],
    shapes: tuple[tuple[int, int, int, int], ...],
) -> list[PagedAttentionCase]:
    names = ("head_dim", "block_size", "num_q_heads", "num_kv_heads")
    sizes = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return [
        *(_case(f"{kind} d{s['head_dim']} block {s['block_size']}", requests, **s) for s in sizes),
        *(_case(f"{kind} {name}", requests, **feature) for name, feature in _FEATURES.items()),
    ]


_BATCHES = (
    _case("prompts", _PREFILL),
    _case("prompts 32/8 heads", _PREFILL, **_LLAMA),
    _case("long prompt", ((2048, 2048),), num_padding_tokens=0),
    _case("chunk far into a prompt", ((512, 20_000), (1, 9000)), block_size=64),
    _case("decode 131,072", ((1, 131_072), (1, 7)), **_LONG),
    _case("131,072 window 4,096", ((1, 131_072), (70, 100_000)), sliding_window=4096, **_LONG),
    _case("many short requests", tuple((1, 1 + 7 * i % 190) for i in range(150))),
    _case("empty requests", ((0, 0), (1, 9), (0, 0), (0, 120), (30, 30)), has_sinks=True),
    _case("padding only", ((0, 0),) * 8, num_padding_tokens=64, max_blocks_per_req=4),
    _case("one token", ((1, 21),), num_padding_tokens=0),
)
# Small batches with every feature also in float32, which Mosaic bodies do not support.
_FLOAT32 = tuple(case for case in CASES if case.dtype == "float32")
CHECKED = (
    # The first case is small: rehearsals run it.
    _case("small", ((1, 40), (20, 70)), head_dim=64, sliding_window=30),
    *_feature_cases("decode", _DECODE, _SHAPES + _DECODED_SHAPES),
    *_feature_cases("mixed", _MIXED, _SHAPES),
    *_BATCHES,
    _case("decode float16", _DECODE, dtype="float16"),
    _case("mixed float16", _MIXED, dtype="float16"),
    *_FLOAT32,
)


def check_problem(case: PagedAttentionCase, seed: int) -> Problem:
    drawn = build_inputs(case, seed)
    arrays = list(drawn.arrays)
    arrays[2] = jnp.asarray(drawn.row, jnp.int32)
    return Problem(
        arrays=tuple(arrays),
        options=drawn.traced_options,
        rules={**drawn.rules, "return_lse": True},
        verify=lambda outputs: _verify(case, drawn, *map(np.asarray, outputs)),
        is_exact=case.dtype == "float32",
    )


def seen_rule(case: PagedAttentionCase) -> SeenRule:
    """The rules of a case that do not depend on its batch."""
    rules = {field.name: getattr(case, field.name) for field in dataclasses.fields(SeenRule)}
    return SeenRule(**rules | {"scale": case.scale or case.head_dim**-0.5})


def _verify(
    case: PagedAttentionCase, drawn: PagedAttentionInputs, out_np: np.ndarray, lse_np: np.ndarray
) -> list[Finding]:
    """Compares every token with float64."""
    sinks_np = None if drawn.sinks is None else np.asarray(drawn.sinks)
    kept = (drawn.keys_np, drawn.values_np)
    wanted_out, wanted_lse = attend_requests(
        np.asarray(drawn.q), case.requests, *kept, seen_rule(case), sinks_np
    )
    limit, sees_any = ERROR_LIMITS[case.dtype], np.isfinite(wanted_lse)
    lse_error = np.linalg.norm(lse_np[sees_any] - wanted_lse[sees_any])
    num_written = np.count_nonzero(out_np[~sees_any].astype(np.float32) != 0)
    return [
        *close_findings("out", out_np, wanted_out, limit),
        Finding(
            what="lse",
            error=float(lse_error / max(1.0, np.linalg.norm(wanted_lse[sees_any]))),
            limit=limit,
        ),
        same_finding("lse of nothing", lse_np[~sees_any], np.float32(wanted_lse[~sees_any])),
        Finding(what="out of nothing", error=float(num_written), limit=0.0),
    ]
