"""Checks of `paged_attention`: every feature, in small random batches, against float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.ops.float64 import SeenRule, attend
from benchmarks.ops.gpu_units import (
    ERROR_LIMITS,
    Finding,
    Program,
    Unit,
    close_findings,
    same_finding,
)
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs

_OP = "paged_attention"
_DECODE = ((1, 5), (1, 16), (0, 0), (1, 333), (1, 1), (1, 1025), (1, 64), (1, 2000))
_PREFILL = ((300, 300), (37, 700), (64, 64), (5, 1029), (0, 0), (129, 129))
_MIXED = ((1, 700), (200, 456), (1, 1), (0, 0), (1, 1500), (130, 130), (3, 3), (1, 65))

_LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_SMALL = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}


def _case(name: str, requests: tuple[tuple[int, int], ...], **sizes: Any) -> PagedAttentionCase:
    return PagedAttentionCase(name=name, requests=requests, **{**_SMALL, **sizes})


def _feature_cases(kind: str, requests: tuple[tuple[int, int], ...]) -> list[PagedAttentionCase]:
    """What attention can be asked for, over one list of requests."""
    shapes = [
        _case(f"{kind} d{head_dim} block {block_size}", requests, **heads)
        for head_dim, block_size, num_q_heads, num_kv_heads in (
            *((128, block_size, 8, 2) for block_size in (8, 16, 32, 64, 128, 256)),
            (64, 16, 8, 8),
            (64, 64, 16, 1),
            (80, 8, 4, 4),
            (96, 16, 6, 2),
            (192, 32, 8, 2),
            (256, 16, 8, 4),
            (256, 64, 4, 1),
        )
        for heads in (
            {
                "head_dim": head_dim,
                "block_size": block_size,
                "num_q_heads": num_q_heads,
                "num_kv_heads": num_kv_heads,
            },
        )
    ]
    return [
        *shapes,
        _case(f"{kind} 32/8 heads", requests, **_LLAMA),
        _case(f"{kind} narrow v", requests, v_head_dim=64),
        _case(f"{kind} window 100", requests, sliding_window=100),
        _case(f"{kind} window 1", requests, sliding_window=1),
        _case(f"{kind} chunks of 192", requests, chunk_size=192),
        _case(f"{kind} soft cap", requests, soft_cap=3.0),
        _case(f"{kind} sinks", requests, has_sinks=True),
        _case(f"{kind} custom scale", requests, scale=0.2),
        _case(f"{kind} not causal", requests, is_causal=False),
        _case(
            f"{kind} window, soft cap, sinks, d256",
            requests,
            head_dim=256,
            sliding_window=200,
            soft_cap=20.0,
            has_sinks=True,
        ),
        _case(f"{kind} int8 cache", requests, cache_dtype="int8"),
        _case(f"{kind} float8 cache", requests, cache_dtype="float8_e4m3fn", sliding_window=300),
    ]


_LONG = {"num_q_heads": 4, "num_kv_heads": 1, "num_rows": 1, "row": 0}
_EMPTY = ((0, 0), (1, 9), (0, 0), (0, 120), (30, 30), (0, 0))
_BATCHES = (
    _case("prompts", _PREFILL),
    _case("prompts 32/8 heads", _PREFILL, **_LLAMA),
    _case("long prompt", ((2048, 2048),), num_padding_tokens=0),
    _case("chunk far into a prompt", ((512, 20_000), (1, 9000)), block_size=64),
    _case("decode 131,072", ((1, 131_072), (1, 7)), **_LONG),
    _case(
        "131,072 window 4,096",
        ((1, 131_072), (70, 100_000)),
        sliding_window=4096,
        block_size=64,
        **_LONG,
    ),
    _case("many short requests", tuple((1, 1 + 7 * i % 190) for i in range(150))),
    _case("empty requests", _EMPTY, has_sinks=True),
    _case("padding only", ((0, 0),) * 8, num_padding_tokens=64, max_blocks_per_req=4),
    _case("one token", ((1, 21),), num_padding_tokens=0),
)
_BFLOAT16 = tuple(
    dataclasses.replace(case, dtype="bfloat16")
    for case in (
        *_feature_cases("decode", _DECODE),
        *_feature_cases("mixed", _MIXED),
        *_BATCHES,
    )
)
_FLOAT16 = tuple(
    _case(f"{kind} float16", requests, dtype="float16")
    for kind, requests in (("decode", _DECODE), ("mixed", _MIXED))
)
_FLOAT32_NAMES = (
    "decode d128 block 16",
    "decode d80 block 8",
    "decode window 100",
    "decode float8 cache",
    "mixed d128 block 64",
    "mixed d256 block 16",
    "mixed chunks of 192",
    "mixed window, soft cap, sinks, d256",
    "mixed not causal",
    "mixed int8 cache",
    "prompts",
    "chunk far into a prompt",
    "empty requests",
    "padding only",
)
_FLOAT32 = tuple(
    dataclasses.replace(case, name=f"{case.name} float32", dtype="float32")
    for case in _BFLOAT16
    if case.name in _FLOAT32_NAMES
)
_DEFAULT_NAMES = ("decode d128 block 16", "mixed d256 block 16", "mixed int8 cache")
_REHEARSED = tuple(
    _case(name, requests, head_dim=64, block_size=16, **sizes)
    for name, requests, sizes in (
        ("decode", ((1, 5), (0, 0), (1, 70)), {"dtype": "bfloat16"}),
        ("mixed", ((1, 40), (20, 70)), {"dtype": "bfloat16", "sliding_window": 30}),
        ("mixed float32", ((1, 40), (20, 70)), {"dtype": "float32", "soft_cap": 3.0}),
    )
)


def check_units(*, is_rehearsal: bool) -> list[Unit]:
    """Every case for every body that is to be held to it, the most telling first."""
    if is_rehearsal:
        return [
            *(_unit(case, "xla") for case in _REHEARSED),
            *(_unit(case, "mosaic_gpu_interpret") for case in _REHEARSED[:2]),
        ]
    return [
        *(_unit(case, "mosaic_gpu") for case in (*_BFLOAT16, *_FLOAT16)),
        *(_unit(case, "default") for case in _BFLOAT16 if case.name in _DEFAULT_NAMES),
        *(_unit(case, "xla") for case in (*_BFLOAT16, *_FLOAT16, *_FLOAT32)),
    ]


def _unit(case: PagedAttentionCase, body: str) -> Unit:
    return Unit(
        kind="check",
        op=_OP,
        case=case.name,
        body=body,
        program=lambda: _AttentionCheck(case, body).program(),
        highest_precision=case.dtype == "float32",
    )


class _AttentionCheck:
    """One case; remembers the keys and values that it drew."""

    def __init__(self, case: PagedAttentionCase, body: str) -> None:
        self.case = case
        self.implementation = None if body == "default" else body
        self.keys_np: tuple[np.ndarray, ...] = ()
        self.values_np: tuple[np.ndarray, ...] = ()
        self.rules: dict[str, Any] = {}

    def program(self) -> Program:
        return Program(make=self.make, step=self.step, verify=self.verify)

    def make(self, seed: int) -> tuple[Any, Any]:
        drawn = build_inputs(self.case, seed)
        self.keys_np, self.values_np, self.rules = drawn.keys_np, drawn.values_np, drawn.rules
        num_tokens, num_q_heads, _ = drawn.q.shape
        v_head_dim = drawn.v_cache.shape[-1]
        state = (
            jnp.full((num_tokens, num_q_heads, v_head_dim), jnp.nan, drawn.q.dtype),
            jnp.full((num_tokens, num_q_heads), jnp.nan, jnp.float32),
        )
        arrays = list(drawn.arrays)
        arrays[3] = jnp.asarray(drawn.row, jnp.int32)
        return state, (tuple(arrays), drawn.traced_options)

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        del step_idx, state
        arrays, options = inputs
        return pallas_kernels.paged_attention(
            *arrays, **self.rules, **options, return_lse=True, implementation=self.implementation
        )

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        del last_step_idx
        out_np, lse_np = (np.asarray(x) for x in state)
        arrays, options = inputs
        q_np = np.asarray(arrays[0])
        sinks = options["sinks"]
        sinks_np = None if sinks is None else np.asarray(sinks)
        rule_names = (field.name for field in dataclasses.fields(SeenRule))
        rule = SeenRule(**{name: self.rules[name] for name in rule_names})
        wanted_out = np.zeros(out_np.shape)
        wanted_lse = np.full(lse_np.shape, -np.inf)
        start = 0
        for req_idx, (num_query, seq_len) in enumerate(self.case.requests):
            tokens = slice(start, start + num_query)
            start += num_query
            wanted_out[tokens], wanted_lse[tokens] = attend(
                q_np[tokens],
                self.keys_np[req_idx],
                self.values_np[req_idx],
                np.arange(seq_len - num_query, seq_len),
                rule,
                sinks_np,
            )
        limit = ERROR_LIMITS[self.case.dtype]
        sees_any = np.isfinite(wanted_lse)
        return [
            *close_findings("out", out_np, wanted_out, limit),
            Finding(
                what="lse",
                error=float(
                    np.linalg.norm(lse_np[sees_any] - wanted_lse[sees_any])
                    / max(1.0, np.linalg.norm(wanted_lse[sees_any]))
                ),
                limit=limit,
            ),
            same_finding("lse of nothing", lse_np[~sees_any], np.float32(wanted_lse[~sees_any])),
            Finding(
                what="out of nothing",
                error=float(np.count_nonzero(out_np[~sees_any].astype(np.float32) != 0)),
                limit=0.0,
            ),
        ]
