"""The GPU half of `python -m benchmarks.ops`: measures the device, checks every op, times it."""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.ops.attention_checks import CHECKED, check_problem
from benchmarks.ops.attention_timings import TIMED, timed_problem, work_of
from benchmarks.ops.device_calls import (
    GUESSED_BYTES_PER_S,
    PROGRAM_S,
    MeasuredOp,
    Work,
    draw_normal,
    sample_seconds,
)
from benchmarks.ops.gpu_report import report
from benchmarks.ops.index_attention import INDEX_OPS
from benchmarks.ops.other_ops import OTHER_OPS
from benchmarks.ops.recurrences import RECURRENT_OPS
from benchmarks.ops.state_steps import STEP_OPS
from benchmarks.units.run import UnitRun
from benchmarks.units.unit import Measured, Unit

_NUM_MATMULS = 4
_PAGED_ATTENTION = MeasuredOp(
    op="paged_attention",
    problem=check_problem,
    cases=CHECKED,
    timed=[(case, work_of(case)) for case in TIMED],
    timed_problem=timed_problem,
)


# The work of a rehearsal: two calls per program. Its rates are meaningless.
_REHEARSED_WORK = Work(num_bytes=round(PROGRAM_S * GUESSED_BYTES_PER_S / 2))


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    """All units, the most important first."""
    return [
        *machine_units(is_rehearsal=is_rehearsal),
        *first_checks(is_rehearsal=is_rehearsal),
        *other_checks(is_rehearsal=is_rehearsal),
        *timings(is_rehearsal=is_rehearsal),
        *xla_checks(is_rehearsal=is_rehearsal),
    ]


def first_checks(*, is_rehearsal: bool) -> list[Unit]:
    """The first case of every op with its Mosaic body, and with the body that the op chooses."""
    ops = _measured_ops(is_rehearsal=is_rehearsal)
    body = kernel_body(is_rehearsal=is_rehearsal)
    # One case is enough to show that the op can choose.
    return [
        *(op.check_unit(op.cases[0], body) for op in ops if op.has_kernel),
        *(op.check_unit(op.cases[0], "default") for op in ops),
    ]


def other_checks(*, is_rehearsal: bool) -> list[Unit]:
    """All other cases of the Mosaic bodies."""
    body = kernel_body(is_rehearsal=is_rehearsal)
    ops = _measured_ops(is_rehearsal=is_rehearsal)
    return [op.check_unit(case, body) for op in ops if op.has_kernel for case in op.cases[1:]]


def timings(*, is_rehearsal: bool) -> list[Unit]:
    ops = _measured_ops(is_rehearsal=is_rehearsal)
    body = kernel_body(is_rehearsal=is_rehearsal)
    return [
        *(op.time_unit(*timed, body) for op in ops if op.has_kernel for timed in op.timed),
        *(op.time_unit(*timed, "xla") for op in ops for timed in op.timed),
    ]


def xla_checks(*, is_rehearsal: bool) -> list[Unit]:
    ops = _measured_ops(is_rehearsal=is_rehearsal)
    return [op.check_unit(case, "xla") for op in ops for case in op.cases]


def kernel_body(*, is_rehearsal: bool) -> str:
    return "mosaic_gpu_interpret" if is_rehearsal else "mosaic_gpu"


def _measured_ops(*, is_rehearsal: bool) -> list[MeasuredOp]:
    """All ops. The first case of each has a dtype that the Mosaic bodies support."""
    ops = []
    for measured in (_PAGED_ATTENTION, *OTHER_OPS, *RECURRENT_OPS, *STEP_OPS, *INDEX_OPS):
        cases = sorted(measured.cases, key=lambda case: getattr(case, "dtype", "") == "float32")
        ops.append(dataclasses.replace(measured, cases=cases))
        if is_rehearsal:
            timed = [(cases[0], _REHEARSED_WORK)]
            ops[-1] = dataclasses.replace(ops[-1], cases=cases[:1], timed=timed, timed_problem=None)
    return ops


def run_gpu(arguments: argparse.Namespace) -> int:
    """Runs units until the time limit; returns an exit code, see `UnitRun`."""
    run = UnitRun(
        arguments,
        benchmark="benchmarks.ops",
        list_units=all_units,
        group_key=process_key,
    )
    return run.run(report)


def process_key(unit: Unit) -> object:
    """Units with the same value share a process. A fault of a kernel ends its process."""
    return unit.body.startswith("mosaic")


def machine_units(*, is_rehearsal: bool) -> list[Unit]:
    num_bytes = 2**24 if is_rehearsal else 2**32
    matrix_dim = 256 if is_rehearsal else 8192
    measures: dict[str, Callable[[int], Measured]] = {
        "copy": functools.partial(_measure_copy, num_bytes),
        "matmul": functools.partial(_measure_matmul, matrix_dim),
    }
    return [
        Unit(kind="machine", op="device", case=name, body="jax", measure=measure)
        for name, measure in measures.items()
    ]


def _measure_copy(num_bytes: int, _: int) -> Measured:
    """A kernel that reads all of an array and writes all of it."""
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    samples = _chained(add_one, jnp.arange(num_bytes // 4, dtype=jnp.int32))
    return Measured(figures={"copy_gb_per_s": [2 * num_bytes / s / 1e9 for s in samples]})


def _measure_matmul(matrix_dim: int, seed: int) -> Measured:
    """Products of random bfloat16 matrices; each takes the result of the one before."""
    x = draw_normal(seed, (matrix_dim, matrix_dim), "bfloat16")
    # The scale keeps the products at one size.
    w = draw_normal(seed + 1, (matrix_dim, matrix_dim), "bfloat16") * matrix_dim**-0.5

    @jax.jit
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _NUM_MATMULS, lambda _, x: x @ w, x)

    samples = _chained(lambda x: multiply(x, w), x)
    num_flops = _NUM_MATMULS * 2 * matrix_dim**3
    return Measured(figures={"matmul_tflop_per_s": [num_flops / s / 1e12 for s in samples]})


def _chained(step: Callable[[jax.Array], jax.Array], state: jax.Array) -> list[float]:
    """Seconds per call of calls that are queued one after another."""
    holder = [state]

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])

    return sample_seconds(run)
