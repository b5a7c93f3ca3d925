"""Checks and timings of the ops that advance states in pages by one token, on a GPU.

Each result is checked against the reference body on the CPU, in float32. The tests compare that
body with the ops that take the states as arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pallas_kernels
from benchmarks.ops.device_calls import MeasuredOp, Problem, Work
from benchmarks.ops.findings import ERROR_LIMITS, close_findings, same_finding
from benchmarks.units.unit import Finding
from pallas_kernels import PagedStates
from pallas_kernels.gated_delta_step import cases as delta_cases
from pallas_kernels.selective_step import cases as selective_cases
from pallas_kernels.ssd_step import cases as ssd_cases


def _problem_maker(
    op: str, build_inputs: Callable[[Any, int], tuple[Any, ...]]
) -> Callable[[Any, int], Problem]:
    def make(case: Any, seed: int) -> Problem:
        arrays = build_inputs(case, seed)
        cpu = jax.devices("cpu")[0]
        on_cpu = jax.device_put(arrays, cpu)
        reference = functools.partial(getattr(pallas_kernels, op), implementation="reference")
        wanted_states, wanted = jax.device_get(jax.jit(reference)(*on_cpu))
        states = jax.device_get(on_cpu[0])
        is_written = states.is_written
        before_np, write_blocks = np.array(states.pages), states.write_blocks
        row, num_blocks = int(states.row), before_np.shape[1]
        size = states.first_number + int(np.prod(case.state_shape))

        def written(states: PagedStates) -> np.ndarray:  # f32[num_reqs, numbers of a slot]
            numbers_np = np.asarray(states.pages).view(states.dtype)
            slots = numbers_np[row, write_blocks[is_written]]
            return slots.reshape(len(slots), -1)[:, states.first_number : size].astype(np.float32)

        def other_pages(pages_np: np.ndarray) -> np.ndarray:
            is_other = np.ones(num_blocks, bool)
            is_other[write_blocks[is_written]] = False
            return pages_np[:, is_other]

        def verify(outputs: tuple[PagedStates, jax.Array]) -> list[Finding]:
            got_states, out = outputs
            limit = ERROR_LIMITS["float32"]
            limit_of_states = max(limit, ERROR_LIMITS[case.state_dtype])
            pairs = (
                ("out", np.asarray(out)[is_written], wanted[is_written], limit),
                ("states", written(got_states), written(wanted_states), limit_of_states),
            )
            found = [
                finding
                for what, got_np, wanted_np, limit in pairs
                for finding in close_findings(what, got_np, wanted_np.astype(np.float64), limit)
            ]
            others = map(other_pages, (np.asarray(got_states.pages), before_np))
            return [*found, same_finding("numbers of other pages", *others)]

        return Problem(arrays=arrays, verify=verify, updates_first=True)

    return make


# 64 decoding requests in layers of Qwen3-Next-80B, Jamba and Mamba-Codestral-7B. A page has 32 KiB.
_DELTA = delta_cases.GatedDeltaStepCase(
    name="64 decodes",
    rows="-" * 64,
    num_heads=32,
    k_dim=128,
    v_dim=128,
    page_lines=64,
    pages_dtype="bfloat16",
    dtype="bfloat16",
)
_SELECTIVE = selective_cases.SelectiveStepCase(
    name="64 decodes",
    rows="-" * 64,
    state_size=16,
    width=8192,
    page_lines=64,
    pages_dtype="bfloat16",
    dtype="bfloat16",
)
_SSD = ssd_cases.SSDStepCase(
    name="64 decodes",
    rows="-" * 64,
    num_heads=128,
    num_groups=8,
    head_dim=64,
    state_size=128,
    page_lines=64,
    pages_dtype="bfloat16",
    dtype="bfloat16",
)

# Each call reads and writes the float32 states once. Tokens are not counted, because they have far
# fewer bytes.
STEP_OPS = [
    MeasuredOp(
        op="gated_delta_step",
        problem=_problem_maker("gated_delta_step", delta_cases.build_inputs),
        cases=delta_cases.CASES[:-1],
        timed=[(_DELTA, Work(num_bytes=2 * 4 * 64 * 32 * 128 * 128))],
    ),
    MeasuredOp(
        op="selective_step",
        problem=_problem_maker("selective_step", selective_cases.build_inputs),
        cases=selective_cases.CASES[:-1],
        timed=[(_SELECTIVE, Work(num_bytes=2 * 4 * 64 * 16 * 8192))],
    ),
    MeasuredOp(
        op="ssd_step",
        problem=_problem_maker("ssd_step", ssd_cases.build_inputs),
        cases=ssd_cases.CASES[:-1],
        timed=[(_SSD, Work(num_bytes=2 * 4 * 64 * 128 * 64 * 128))],
    ),
]
