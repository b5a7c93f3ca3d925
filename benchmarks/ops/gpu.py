"""The GPU half of `python -m benchmarks.ops`: measures the device, checks every op, times it."""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.ops.attention_checks import CHECKED, check_problem
from benchmarks.ops.attention_timings import TIMED, timed_problem, work_of
from benchmarks.ops.device_calls import MeasuredOp, Work, draw_normal, take_samples
from benchmarks.ops.gpu_report import report
from benchmarks.ops.other_ops import OTHER_OPS
from benchmarks.units.run import UnitRun
from benchmarks.units.unit import Measured, Unit

_BODY_ORDER = ("mosaic_gpu", "default", "xla", "mosaic_gpu_interpret")
_NUM_MATMULS = 4
_PAGED_ATTENTION = MeasuredOp(
    op="paged_attention",
    problem=check_problem,
    cases=CHECKED,
    timed=[(case, work_of(case)) for case in TIMED],
    timed_problem=timed_problem,
)


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    """Device, then checks, then timings; within each, Mosaic bodies first."""
    units: list[Unit] = []
    for measured in (_PAGED_ATTENTION, *OTHER_OPS):
        checked, timed = measured.cases, measured.timed
        bodies, timed_bodies = ("mosaic_gpu", "xla"), ("mosaic_gpu", "xla")
        if is_rehearsal:
            # Rates of a rehearsal mean nothing.
            checked, timed = checked[:1], [(checked[0], Work(num_bytes=2**20))]
            bodies, timed_bodies = ("xla", "mosaic_gpu_interpret"), ("xla",)
        else:
            # It chooses one of the other bodies: one case shows that it can choose.
            units.append(measured.check_unit(checked[0], "default"))
        units += [measured.check_unit(case, body) for body in bodies for case in checked]
        units += [measured.time_unit(*pair, body) for body in timed_bodies for pair in timed]
    units.sort(key=lambda unit: (unit.kind != "check", _BODY_ORDER.index(unit.body)))
    return [*machine_units(is_rehearsal=is_rehearsal), *units]


def run_gpu(arguments: argparse.Namespace) -> int:
    """Runs what there is time for; returns an exit code, see `UnitRun`."""
    run = UnitRun(
        arguments,
        benchmark="benchmarks.ops",
        list_units=all_units,
        group_key=lambda unit: unit.body.startswith("mosaic"),
    )
    return run.run(report)


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
    """Seconds of one call, of calls queued one after another."""
    holder = [state]

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])

    return take_samples(run)
