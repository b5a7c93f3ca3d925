"""The GPU benchmark: measures the device, checks every op, times it beside its peers.

The stages, in order, none of which can take the next one with it: what the device can do; the
checks, several processes at once; the timings, one process at a time, of the Mosaic bodies, of
XLA's, of the peers; the checks for which there was no time at first.
"""

import contextlib
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.command_line import BenchmarkError
from benchmarks.ops.gpu_list import all_units
from benchmarks.ops.gpu_processes import Result, UnitRunner
from benchmarks.ops.gpu_report import (
    Ceilings,
    ceilings_of,
    check_lines,
    compile_line,
    compile_summary,
    failure_lines,
    is_compile_failure,
    is_wrong,
    machine_lines,
    mixed_lines,
    row_of,
    table_lines,
)
from benchmarks.ops.gpu_units import Unit
from benchmarks.result_rows import append_rows

# Of the time limit: what the checks may take before the timings begin, and what the end needs.
CHECKS_SHARE = 0.42
REPORT_S = 8.0
MACHINE_S = 90.0
NUM_CHECKING_AT_ONCE = 6
MAX_UNITS_A_CHECK_GROUP = 10
MAX_UNITS_A_TIME_GROUP = 12
MAX_UNITS_A_COMPILE_GROUP = 40
COMPILE_SILENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What the command line asks for.

    Args:
        out: File of JSON lines; the report goes beside it, with the suffix `.md`.
        only: An op; all others are left out.
        body: What the names of bodies begin with; all others are left out.
        time_limit_s: Ends by then, and says what was left out.
        seed: What the inputs are drawn from; None draws it.
        commit: Hash to write down where the code is no git checkout.
        folder: Where events and logs of the processes go; None is a temporary one.
    """

    out: Path
    only: str | None = None
    body: str | None = None
    time_limit_s: float = 450.0
    is_quick: bool = False
    is_rehearsal: bool = False
    is_tuning: bool = False
    seed: int | None = None
    commit: str | None = None
    folder: Path | None = None


@dataclass(slots=True)
class _Gathered:
    """What has come in so far; rows are written as they come."""

    options: GpuOptions
    started: float
    results: list[Result] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings = field(default_factory=Ceilings)

    def take(self, result: Result) -> None:
        self.results.append(result)
        if result.unit.kind == "machine":
            self.ceilings = ceilings_of(self.results)
        device = self.device.get("device", "unknown")
        row = row_of(result, self.ceilings, device, self.options.commit)
        append_rows([row], self.options.out)
        note = "WRONG" if result.outcome == "done" and is_wrong(result) else result.outcome
        took_s = result.fields.get("took_s", 0.0)
        passed_s = time.monotonic() - self.started
        print(f"{passed_s:6.1f} s  {note:8} {result.unit.key}  {took_s:.1f} s", flush=True)

    def take_device(self, device: dict[str, Any]) -> None:
        self.device = device


def run_gpu(options: GpuOptions) -> int:
    """Runs everything there is time for.

    Returns:
        The exit code: 0 if nothing of ours was wrong, failed or died; 1 if something was; 2
        without a GPU. A figure that is missed is no failure.
    """
    started = time.monotonic()
    deadline = started + options.time_limit_s - REPORT_S
    units = all_units(
        is_rehearsal=options.is_rehearsal,
        is_quick=options.is_quick,
        only=options.only,
        body=options.body,
        is_tuning=options.is_tuning,
    )
    gathered = _Gathered(options, started)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ops_gpu_"))
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbits(30) if options.seed is None else options.seed
    print(f"{len(units)} units, seed {seed}, logs in {folder}", flush=True)
    runner = UnitRunner(
        folder=folder,
        run_seed=seed,
        worker_options=["--rehearse"] * options.is_rehearsal + ["--tune"] * options.is_tuning,
        on_result=gathered.take,
        on_device=gathered.take_device,
    )
    with _stopped_by_signals(runner):
        code = _run_stages(runner, units, gathered, deadline)
    if code is not None:
        return code
    report = _report(gathered)
    options.out.with_suffix(".md").write_text(report + "\n")
    print(report, flush=True)
    return int(any(_is_bad(result) for result in gathered.results))


@contextlib.contextmanager
def _stopped_by_signals(runner: UnitRunner) -> Iterator[None]:
    """Whoever ends the run early (`timeout`, Ctrl-C) gets the report of what was done by then.

    Without it, the processes, each the leader of a session of its own, would go on alone.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: runner.stop()) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _is_bad(result: Result) -> bool:
    """Whether something of ours did not do what it should; what a peer does is its own affair."""
    is_ours = result.unit.kind == "machine" or result.unit.is_ours
    return is_ours and (result.outcome in ("failed", "died") or is_wrong(result))


def run_compile_only(options: GpuOptions, target_config: Path) -> int:
    """Compiles the units of the full run for a described GPU; prints what each came to.

    Returns:
        The exit code: 1 if one did not compile, or would not measure what it is to measure.
    """
    if not target_config.is_file():
        raise BenchmarkError(
            f"no description of a GPU: got {target_config}, wanted a file in the format of XLA's "
            "GpuTargetConfigProto. Name one with --target-config."
        )
    units = all_units(
        is_rehearsal=False,
        is_quick=options.is_quick,
        only=options.only,
        body=options.body,
        is_tuning=options.is_tuning,
    )
    # "default" picks by the device at hand, and comes to one of the others.
    units = [unit for unit in units if unit.program is not None and unit.body != "default"]
    # The timings first: they are large.
    units = [unit for kind in ("time", "check") for unit in units if unit.kind == kind]
    results: list[Result] = []

    def take(result: Result) -> None:
        results.append(result)
        print(compile_line(result), flush=True)

    folder = options.folder or Path(tempfile.mkdtemp(prefix="ops_gpu_"))
    folder.mkdir(parents=True, exist_ok=True)
    runner = UnitRunner(
        folder=folder,
        run_seed=0,
        worker_options=[
            *("--compile-for", str(target_config.resolve())),
            *(["--tune"] * options.is_tuning),
        ],
        on_result=take,
        on_device=lambda device: None,
        min_silence_s=COMPILE_SILENCE_S,
    )
    deadline = time.monotonic() + options.time_limit_s
    groups = _groups(units, MAX_UNITS_A_COMPILE_GROUP)
    runner.run_groups(groups, deadline=deadline, num_at_once=2)
    print("\n".join(compile_summary(results)))
    return int(any(is_compile_failure(result) for result in results))


def _run_stages(
    runner: UnitRunner, units: list[Unit], gathered: _Gathered, deadline: float
) -> int | None:
    """Runs what there is time for; the exit code if there is no device to run it on."""
    options = gathered.options
    machine = [unit for unit in units if unit.kind == "machine"]
    machine_deadline = min(deadline, gathered.started + MACHINE_S)
    runner.run_groups([machine], deadline=machine_deadline, num_at_once=1)
    platform = gathered.device.get("platform")
    if platform != "gpu" and not options.is_rehearsal:
        print(
            f"no GPU: got the platform {platform!r} from JAX, wanted 'gpu'. Install jax[cuda13], "
            "or pass --rehearse to try the program in small on a CPU."
        )
        print("\n".join(failure_lines(gathered.results)))
        return 2
    checks = [unit for unit in units if unit.kind == "check"]
    timings = [unit for unit in units if unit.kind == "time"]
    checks_deadline = gathered.started + CHECKS_SHARE * options.time_limit_s
    num_at_once = 1 if options.is_rehearsal else NUM_CHECKING_AT_ONCE
    groups = _groups(checks, MAX_UNITS_A_CHECK_GROUP)
    runner.run_groups(groups, deadline=min(deadline, checks_deadline), num_at_once=num_at_once)
    runner.run_groups(_groups(timings, MAX_UNITS_A_TIME_GROUP), deadline=deadline, num_at_once=1)
    late = [
        result.unit
        for result in gathered.results
        if result.unit.kind == "check" and result.reason == "out of time"
    ]
    if late and time.monotonic() < deadline:
        gathered.results = [r for r in gathered.results if r.unit not in late]
        late_groups = _groups(late, MAX_UNITS_A_CHECK_GROUP)
        runner.run_groups(late_groups, deadline=deadline, num_at_once=num_at_once)
    return None


def _groups(units: Sequence[Unit], max_units: int) -> list[list[Unit]]:
    """Runs of units of one kind of code, cut where they are long: each group is a process.

    Ops share processes, of which each takes seconds to start; what dies is started again without
    the unit that killed it.
    """
    runs = (list(run) for _, run in groupby(units, key=_kind_of_code))
    return [
        run[start : start + max_units] for run in runs for start in range(0, len(run), max_units)
    ]


def _kind_of_code(unit: Unit) -> str:
    """Ours that may hang, XLA's, torch's."""
    kinds = (kind for kind in ("mosaic", "torch") if unit.body.startswith(kind))
    return next(kinds, "xla")


def _report(gathered: _Gathered) -> str:
    results = gathered.results
    seconds = time.monotonic() - gathered.started
    device = f"{gathered.device.get('device')}, JAX {gathered.device.get('jax')}"
    lines = [f"# Ops on {device}, {seconds:.0f} s", "", "## Device", ""]
    lines += [f"- {line}" for line in machine_lines(results)]
    lines += ["", "## Checks", "", *(f"- {line}" for line in check_lines(results))]
    lines += ["", "## What did not go well", "", *(f"- {x}" for x in failure_lines(results))]
    lines += ["", "## Timings", "", *table_lines(results, gathered.ceilings)]
    lines += ["", *(f"- {line}" for line in mixed_lines(results))]
    return "\n".join(lines)
