"""Calls an op on the device once and verifies the result; then can time many calls."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.units.unit import Finding, Measured, Unit

# A sample is a queue of programs that takes at least this long. Launching the first program and
# waiting for the last take about 0.1 ms, under 0.3 % of it.
SAMPLE_S = 0.04
MAX_CALLS = 200
NUM_SAMPLES = 20
# Most of a check is compilation.
CHECK_TIME_LIMIT_S = 30.0
BUDGET_S = 1.5
# About the rates of an H200. They only serve to guess the time of a call before it is measured.
GUESSED_BYTES_PER_S, GUESSED_FLOPS_PER_S = 4e12, 6e14
# A program with shorter calls repeats them for this long, which hides the cost of launching it.
PROGRAM_S = 2e-4
MAX_CALLS_PER_PROGRAM = 64
# Buffers of NaN, which are freed before each unit. The allocator gives their memory to the unit's
# outputs, so a place that a body never writes holds NaN.
NUM_POISON_BUFFERS, POISON_BYTES = 8, 2**26


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Lower bounds of what one call moves (each input and output once) and computes."""

    num_bytes: int
    num_flops: int = 0

    @property
    def calls_per_program(self) -> int:
        """1 for a call of 0.2 ms; 20 for a call of 10 microseconds."""
        guess_s = max(self.num_bytes / GUESSED_BYTES_PER_S, self.num_flops / GUESSED_FLOPS_PER_S)
        return min(MAX_CALLS_PER_PROGRAM, math.ceil(PROGRAM_S / max(guess_s, 1e-6)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of an op, and the check of its outputs.

    Args:
        arrays: The positional arguments.
        options: Keyword arguments that are arrays.
        rules: Keyword arguments that are static.
        updates_first: The first argument is donated, and the output takes its place. If there are
            several outputs, the first one does.
        is_exact: Computes float32 products in full float32.
    """

    arrays: tuple[Any, ...]
    verify: Callable[[Any], list[Finding]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    updates_first: bool = False
    is_exact: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """An op of `pallas_kernels`, with the cases that this benchmark checks and times.

    Args:
        problem: Makes the call of a case from a seed.
        timed_problem: Makes the calls that are timed; None uses `problem` for them too.
        has_kernel: Whether the op has a Mosaic GPU body.
    """

    op: str
    problem: Callable[[Any, int], Problem]
    cases: Sequence[Any]
    timed: Sequence[tuple[Any, Work]]
    timed_problem: Callable[[Any, int], Problem] | None = None
    has_kernel: bool = True

    def check_unit(self, case: Any, body: str) -> Unit:
        """Compares one call with its expected result; the body "default" lets the op choose."""
        measure = functools.partial(_measure, self.op, body, self.problem, case, None)
        return Unit(
            kind="check",
            op=self.op,
            case=case.name,
            body=body,
            measure=measure,
            time_limit_s=CHECK_TIME_LIMIT_S,
        )

    def time_unit(self, case: Any, work: Work, body: str) -> Unit:
        """Compares one call with its expected result, then times many calls."""
        problem = self.timed_problem or self.problem
        measure = functools.partial(_measure, self.op, body, problem, case, work)
        return Unit(kind="time", op=self.op, case=case.name, body=body, measure=measure)


def _measure(
    op: str,
    body: str,
    build: Callable[[Any, int], Problem],
    case: Any,
    work: Work | None,
    seed: int,
) -> Measured:
    """Calls the op once and verifies its outputs. With `work` and a right result, times it too."""
    problem = build(case, seed)
    implementation = None if body == "default" else body
    rules = {**problem.rules, "implementation": implementation}

    def function(*arrays: Any) -> Any:
        *positional, options = arrays
        return getattr(pallas_kernels, op)(*positional, **options, **rules)

    arrays = (*problem.arrays, dict(problem.options))
    _poison_free_memory()
    donated = (0,) if problem.updates_first else ()
    with jax.default_matmul_precision("highest" if problem.is_exact else None):
        call = jax.jit(function, donate_argnums=donated).lower(*arrays).compile()
    outputs = jax.block_until_ready(call(*arrays))
    findings = problem.verify(outputs)
    if work is None or not all(finding.is_right for finding in findings):
        error = findings[0].error
        figures = {"relative_error": [error]} if np.isfinite(error) and work is None else {}
        return Measured(figures=figures, findings=findings)
    num_calls = work.calls_per_program
    program = jax.jit(
        functools.partial(_repeat, function, num_calls, problem.updates_first), donate_argnums=0
    )
    holder, others = [outputs], arrays[len(donated) :]

    def run(num_programs: int) -> None:
        for _ in range(num_programs):
            holder[0] = program(holder[0], others)
        jax.block_until_ready(holder[0])

    return Measured(
        figures={"call_ms": [1e3 * seconds / num_calls for seconds in sample_seconds(run)]},
        findings=findings,
        details={**dataclasses.asdict(work), "method": f"{num_calls} calls per program"},
    )


def _repeat(
    function: Callable[..., Any], num_calls: int, updates_first: bool, outputs: Any, others: Any
) -> Any:
    """Calls a function several times, each time after the call before."""

    def call(_: jax.Array, outputs: Any) -> Any:
        if updates_first:
            updated = outputs[0] if isinstance(outputs, tuple) else outputs
            return function(updated, *others)
        return function(*_depending_on(outputs, others))

    return lax.fori_loop(0, num_calls, call, outputs) if num_calls > 1 else call(0, outputs)


def _depending_on(outputs: Any, arrays: Any) -> Any:
    """The arrays, with a zero that comes from `outputs` added to the smallest one.

    The compiler does not know that it is zero. Without this dependency, it would move equal calls
    out of the loop, or fuse them into one.
    """
    first = jax.tree.leaves(outputs)[0]
    zero = first[(0,) * first.ndim] == 12_345
    leaves, structure = jax.tree.flatten(arrays)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] += zero.astype(leaves[smallest].dtype)
    return jax.tree.unflatten(structure, leaves)


def sample_seconds(run: Callable[[int], None], budget_s: float = BUDGET_S) -> list[float]:
    """Seconds of one `run`, once per sample.

    Args:
        run: `run(n)` queues n programs and waits for all of them.
        budget_s: No sample begins after this long; at least 3 are taken.
    """
    started = time.perf_counter()
    run(1)
    once_s = _elapsed_s(lambda: run(1))
    num_calls = max(1, min(MAX_CALLS, round(SAMPLE_S / max(once_s, 1e-6))))
    run(num_calls)  # clocks and caches settle
    samples: list[float] = []
    while len(samples) < NUM_SAMPLES:
        if len(samples) >= 3 and time.perf_counter() - started > budget_s:
            break
        samples.append(_elapsed_s(lambda: run(num_calls)) / num_calls)
    return samples


def _elapsed_s(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _poison_free_memory() -> None:
    num_bytes = POISON_BYTES if jax.default_backend() == "gpu" else 2**16
    buffers = [jnp.full((num_bytes // 4,), jnp.nan, jnp.float32) for _ in range(NUM_POISON_BUFFERS)]
    jax.block_until_ready(buffers)


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers drawn on the device, because large inputs are slow to transfer."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
