"""The GPU half of `python -m benchmarks.ops`: measures the device, checks every op, times it."""

import argparse
from collections.abc import Sequence
from itertools import groupby

from benchmarks.command_line import BenchmarkError
from benchmarks.ops import attention_checks, attention_timings, other_ops
from benchmarks.ops.gpu_report import report
from benchmarks.ops.machine import machine_units
from benchmarks.units.run import Stage, UnitRun
from benchmarks.units.unit import Unit

BENCHMARK = "benchmarks.ops"
LISTED_BY = "benchmarks.ops.gpu:all_units"
# The share of the time limit after which timings begin, whatever checks are left.
CHECKS_SHARE = 0.42
NUM_CHECKING_AT_ONCE = 6
MAX_UNITS_PER_GROUP = 12
_BODY_ORDER = ("mosaic_gpu", "default", "xla", "mosaic_gpu_interpret")


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    """Device, then checks, then timings; within each, Mosaic bodies first and peers last."""
    lists = (attention_checks.check_units, attention_timings.timing_units, other_ops.units)
    units = [unit for listed in lists for unit in listed(is_rehearsal=is_rehearsal)]
    units.sort(key=lambda unit: (unit.kind != "check", _body_rank(unit)))
    return [*machine_units(is_rehearsal=is_rehearsal), *units]


def chosen_units(*, is_rehearsal: bool, op: str | None, body: str | None) -> list[Unit]:
    """The units of an op, of bodies that begin with `body`, or of all, and those of the device.

    Raises:
        BenchmarkError: No unit has this op or body.
    """
    units = all_units(is_rehearsal=is_rehearsal)
    for name, value in (("op", op), ("body", body)):
        known = sorted({getattr(unit, name) for unit in units if unit.kind != "machine"})
        if value is not None and not any(k.startswith(value) for k in known):
            raise BenchmarkError(f"no such {name}: got {value!r}, wanted one of {known}.")
    return [
        unit
        for unit in units
        if unit.kind == "machine"
        or (op in (None, unit.op) and (body is None or unit.body.startswith(body)))
    ]


def run_gpu(arguments: argparse.Namespace) -> int:
    """Runs what there is time for; returns an exit code, see `UnitRun`."""
    units = chosen_units(is_rehearsal=arguments.rehearse, op=arguments.only, body=arguments.body)
    if arguments.list:
        print("\n".join(unit.key for unit in units))
        return 0
    run = UnitRun(arguments, benchmark=BENCHMARK, listed_by=LISTED_BY, default_out="ops_gpu.jsonl")
    machine, checks, timings = (
        groups_of([unit for unit in units if unit.kind == kind])
        for kind in ("machine", "check", "time")
    )
    num_at_once = 1 if arguments.rehearse else NUM_CHECKING_AT_ONCE
    checks_s = CHECKS_SHARE * arguments.time_limit
    code = run.run(
        [
            Stage(groups=machine),
            Stage(groups=checks, num_at_once=num_at_once, limit_s=checks_s),
            Stage(groups=timings),
        ]
    )
    if code is not None:
        return code
    return run.finish(report(run.rows, run.results, device=run.device))


def groups_of(units: Sequence[Unit]) -> list[list[Unit]]:
    """Runs of units of one kind of code, cut to `MAX_UNITS_PER_GROUP`: each is a process.

    Ops share processes, because starting one takes seconds. torch gets its own, as it takes memory
    from JAX.
    """
    runs = (list(run) for _, run in groupby(units, key=_kind_of_code))
    size = MAX_UNITS_PER_GROUP
    return [run[start : start + size] for run in runs for start in range(0, len(run), size)]


def _kind_of_code(unit: Unit) -> str:
    return next((kind for kind in ("mosaic", "torch") if unit.body.startswith(kind)), "xla")


def _body_rank(unit: Unit) -> int:
    return _BODY_ORDER.index(unit.body) if unit.body in _BODY_ORDER else len(_BODY_ORDER)
