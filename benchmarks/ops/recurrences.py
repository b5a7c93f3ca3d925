"""Checks and timings of the recurrent ops on a GPU, which have no kernel of their own yet.

Each result is checked against the reference body on the CPU, in float32. The tests compare that
body with the definition in float64.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pallas_kernels
from benchmarks.ops.device_calls import MeasuredOp, Problem, Work
from benchmarks.ops.findings import ERROR_LIMITS, close_findings
from benchmarks.units.unit import Finding
from pallas_kernels.causal_conv1d import cases as conv_cases
from pallas_kernels.gated_delta_rule import cases as delta_cases
from pallas_kernels.rg_lru_scan import cases as lru_cases
from pallas_kernels.selective_scan import cases as selective_cases
from pallas_kernels.ssd_scan import cases as ssd_cases


def _problem_maker(
    op: str, build_inputs: Callable[[Any, int], tuple[jax.Array, ...]]
) -> Callable[[Any, int], Problem]:
    def make(case: Any, seed: int) -> Problem:
        arrays = build_inputs(case, seed)
        cpu = jax.devices("cpu")[0]
        reference = functools.partial(getattr(pallas_kernels, op), implementation="reference")
        wanted, wanted_states = jax.device_get(jax.jit(reference)(*jax.device_put(arrays, cpu)))
        num_used, has_tokens = sum(case.counts), np.array(case.counts) > 0

        def verify(outputs: tuple[jax.Array, jax.Array]) -> list[Finding]:
            out_np, states_np = map(np.asarray, outputs)
            limit = ERROR_LIMITS["float32"]
            return [
                *_close("out", out_np[:num_used], wanted[:num_used], limit),
                *_close("states", states_np[has_tokens], wanted_states[has_tokens], limit),
            ]

        is_decode = getattr(case, "has_one_token_each", False)
        rules = {"has_one_token_each": True} if is_decode else {}
        if getattr(case, "positions", None) is not None:
            rules["positions"] = case.positions
        return Problem(arrays=arrays, rules=rules, verify=verify)

    return make


def _close(what: str, got: np.ndarray, wanted: np.ndarray, limit: float) -> list[Finding]:
    return close_findings(what, got, wanted.astype(np.float64), limit)


# Layers of Qwen3-Next-80B, RecurrentGemma-2B, Falcon-Mamba-7B and Mamba-Codestral-7B: 64
# decoding requests.
_DECODES = {"name": "64 decodes", "counts": (1,) * 64, "dtype": "bfloat16"}
_CONV = conv_cases.CausalConv1dCase(num_channels=8192, **_DECODES)
_DELTA = delta_cases.GatedDeltaRuleCase(num_heads=32, k_dim=128, v_dim=128, **_DECODES)
_LRU = lru_cases.RGLRUScanCase(width=2560, **_DECODES)
_SELECTIVE = selective_cases.SelectiveScanCase(width=8192, state_size=16, **_DECODES)
_SSD = ssd_cases.SSDScanCase(num_heads=128, num_groups=8, head_dim=64, state_size=128, **_DECODES)

# Each call reads and writes the float32 states once. Tokens are not counted, because they have far
# fewer bytes.
RECURRENT_OPS = [
    MeasuredOp(
        op="causal_conv1d",
        problem=_problem_maker("causal_conv1d", conv_cases.build_inputs),
        cases=conv_cases.CASES,
        timed=[(_CONV, Work(num_bytes=2 * 4 * 64 * 3 * 8192))],
        has_kernel=False,
    ),
    MeasuredOp(
        op="gated_delta_rule",
        problem=_problem_maker("gated_delta_rule", delta_cases.build_inputs),
        cases=delta_cases.CASES,
        timed=[(_DELTA, Work(num_bytes=2 * 4 * 64 * 32 * 128 * 128))],
        has_kernel=False,
    ),
    MeasuredOp(
        op="rg_lru_scan",
        problem=_problem_maker("rg_lru_scan", lru_cases.build_inputs),
        cases=lru_cases.CASES,
        timed=[(_LRU, Work(num_bytes=2 * 4 * 64 * 2560))],
        has_kernel=False,
    ),
    MeasuredOp(
        op="selective_scan",
        problem=_problem_maker("selective_scan", selective_cases.build_inputs),
        cases=selective_cases.CASES,
        timed=[(_SELECTIVE, Work(num_bytes=2 * 4 * 64 * 16 * 8192))],
        has_kernel=False,
    ),
    MeasuredOp(
        op="ssd_scan",
        problem=_problem_maker("ssd_scan", ssd_cases.build_inputs),
        cases=ssd_cases.CASES,
        timed=[(_SSD, Work(num_bytes=2 * 4 * 64 * 128 * 64 * 128))],
        has_kernel=False,
    ),
]
