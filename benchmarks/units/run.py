"""Runs a list of units in stages, writes rows as they come, and resumes from written rows."""

import argparse
import contextlib
import dataclasses
import json
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import output_file, output_folder, positive_float, seed_number
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, commit_hash
from benchmarks.units.runner import UnitRunner
from benchmarks.units.unit import Result, Unit
from benchmarks.units.worker import DEVICE_UNIT

# Kept for ending processes and writing the report.
REPORT_S = 8.0
NO_GPU_EXIT, UNFINISHED_EXIT = 2, 3
# Units with these outcomes are not run again by --resume.
_FINISHED = ("done", "absent")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Groups of units that run before those of the next stage.

    Args:
        limit_s: Units that do not finish in this time are skipped; None is the run's limit.
    """

    groups: Sequence[Sequence[Unit]]
    num_at_once: int = 1
    limit_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow(ResultRow):
    """A result row of a unit, or a row without values that says why there is no figure."""

    details: Mapping[str, Any]
    commit: str

    def as_dict(self) -> dict[str, object]:
        row = super(UnitRow, self).as_dict()
        return {**row, "commit": self.commit, **self.details}


def add_run_arguments(parser: argparse._ActionsContainer, *, time_limit_s: float) -> None:
    """Adds the flags of every run of units."""
    parser.add_argument("--out", type=output_file, help="file of JSON lines to append rows to")
    parser.add_argument(
        "--time-limit", type=positive_float, default=time_limit_s, metavar="S", help="in seconds"
    )
    parser.add_argument("--seed", type=seed_number, help="of the inputs; drawn if left out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="run only units without a row of this commit and device in --out",
    )
    parser.add_argument("--commit", help="for the rows, where the code is no git checkout")
    parser.add_argument("--logs", type=output_folder, help="folder for events and logs of workers")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run tiny shapes on any device, to test the program; rows are marked",
    )
    parser.add_argument("--list", action="store_true", help="print the units and end")


class UnitRun:
    """One run of a benchmark's units.

    Args:
        benchmark: Module name, for the rows.
        listed_by: "module:function" that lists all units.
        default_out: Name of the file in the results folder.
    """

    def __init__(
        self, arguments: argparse.Namespace, *, benchmark: str, listed_by: str, default_out: str
    ) -> None:
        self._benchmark = benchmark
        self._is_rehearsal: bool = arguments.rehearse
        self._started = time.monotonic()
        self._deadline = self._started + arguments.time_limit - REPORT_S
        self._commit = arguments.commit or commit_hash()
        # Rehearsed rows must not end among results.
        folder = Path(tempfile.mkdtemp()) if arguments.rehearse else RESULTS_FOLDER
        self.out: Path = arguments.out or folder / default_out
        self._is_resuming: bool = arguments.resume
        self._device: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self.results: list[Result] = []
        logs = arguments.logs or Path(tempfile.mkdtemp(prefix="paxkv_units_"))
        self._seed = secrets.randbits(30) if arguments.seed is None else arguments.seed
        print(f"seed {self._seed}, rows to {self.out}, logs in {logs}", flush=True)
        self._runner = UnitRunner(
            folder=logs,
            listed_by=listed_by,
            run_seed=self._seed,
            is_rehearsal=arguments.rehearse,
            on_result=self._take,
        )

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """Rows of this run and, with --resume, of the runs that it continues."""
        return self._rows

    @property
    def device(self) -> str:
        return self._device.get("device", "unknown")

    def run(self, stages: Sequence[Stage]) -> int | None:
        """Runs what there is time for.

        Returns:
            None, or the exit code where there is no GPU.
        """
        with _stopped_by_signals(self._runner):
            self._runner.run_groups([[DEVICE_UNIT]], deadline=self._deadline)
            if self._device.get("platform") != "gpu" and not self._is_rehearsal:
                platform = self._device.get("platform")
                print(
                    f"no GPU: JAX has the platform {platform!r}. Install jax[cuda13], or pass "
                    "--rehearse to try the program with tiny shapes."
                )
                return NO_GPU_EXIT
            finished = self._read_finished() if self._is_resuming else set()
            for stage in stages:
                groups = [[u for u in group if u.key not in finished] for group in stage.groups]
                deadline = self._deadline
                if stage.limit_s is not None:
                    deadline = min(deadline, time.monotonic() + stage.limit_s)
                self._runner.run_groups(
                    [group for group in groups if group],
                    deadline=deadline,
                    num_at_once=stage.num_at_once,
                )
        return None

    def finish(self, report: str) -> int:
        """Writes and prints the report; returns the exit code.

        0 if every unit ran, 1 if something of ours was wrong, failed or died, 3 if units are left
        for --resume.
        """
        self.out.with_suffix(".md").write_text(report + "\n")
        print(report, flush=True)
        if any(result.is_our_fault for result in self.results):
            return 1
        num_left = sum(result.outcome == "skipped" for result in self.results)
        if num_left:
            print(f"{num_left} units are left; run the command again with --resume.")
            return UNFINISHED_EXIT
        return 0

    def _read_finished(self) -> set[str]:
        """Keys of units with a row of the same commit, device and kind of run; keeps the rows."""
        lines = self.out.read_text().splitlines() if self.out.is_file() else []
        # The run that is resumed may have been killed while it wrote its last line.
        written = [json.loads(line) for line in lines if line.endswith("}")]
        same = {"benchmark": self._benchmark, "commit": self._commit, "device": self.device}
        found = [
            row
            for row in written
            if all(row[name] == value for name, value in same.items())
            and row.get("rehearsal", False) == self._is_rehearsal
            and row.get("outcome") in _FINISHED
        ]
        self._rows += found
        return {row["unit"] for row in found}

    def _take(self, result: Result) -> None:
        if result.unit.key == DEVICE_UNIT.key:
            self._device = dict(result.measured.details) if result.measured else {}
            if result.measured is None:
                print(f"no device: {result.reason}", flush=True)
            return
        self.results.append(result)
        rows = unit_rows(
            result,
            benchmark=self._benchmark,
            device=self.device,
            commit=self._commit,
            is_rehearsal=self._is_rehearsal,
        )
        append_rows(rows, self.out)
        self._rows += [row.as_dict() for row in rows]
        note = "WRONG" if result.is_wrong else result.outcome
        passed_s = time.monotonic() - self._started
        print(f"{passed_s:6.1f} s  {note:8} {result.unit.key}  {result.took_s:.1f} s", flush=True)


def unit_rows(
    result: Result, *, benchmark: str, device: str, commit: str, is_rehearsal: bool
) -> list[UnitRow]:
    """A row per figure, or one row without values if there is none."""
    unit = result.unit
    details: dict[str, Any] = {
        "unit": unit.key,
        "outcome": result.outcome,
        "seed": result.seed,
        **({"rehearsal": True} if is_rehearsal else {}),
    }
    figures: Mapping[str, Sequence[float]] = {}
    if result.measured is not None:
        figures = result.measured.figures
        wrong = [f for f in result.measured.findings if not f.is_right]
        details |= {"is_right": not wrong, "wrong": [f"{f.what} {f.error:.1e}" for f in wrong]}
        details |= result.measured.details
    else:
        details["reason"] = result.reason
    return [
        UnitRow(
            benchmark=benchmark,
            case=f"{unit.op}, {unit.case}, {unit.body}",
            metric=metric,
            values=values,
            device=device,
            details=details,
            commit=commit,
        )
        for metric, values in (figures or {"none": ()}).items()
    ]


@contextlib.contextmanager
def _stopped_by_signals(runner: UnitRunner) -> Iterator[None]:
    """Ends the run at SIGTERM or Ctrl-C, so that the report of finished units is still written.

    Workers lead sessions of their own and would otherwise continue alone.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: runner.stop()) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
