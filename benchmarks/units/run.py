"""Runs a list of units in order, writes rows as they come, and continues from written rows."""

import argparse
import itertools
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import (
    BenchmarkError,
    output_file,
    positive_float,
    seed_number,
)
from benchmarks.result_rows import (
    REHEARSAL,
    RESULTS_FOLDER,
    ResultRow,
    append_rows,
    commit_hash,
    drop_unfinished_line,
)
from benchmarks.units.runner import DEVICE_UNIT, ListUnits, UnitRunner
from benchmarks.units.unit import Result, Unit

# Of a whole run; the last seconds are kept for ending processes and writing the report.
TIME_LIMIT_S, REPORT_S = 530.0, 8.0
NO_GPU_EXIT, UNFINISHED_EXIT = 2, 3
# Most of a check is compilation on the host, so several run at once.
MAX_CHECKING_AT_ONCE = 6
MAX_UNITS_PER_GROUP = 12
# Git ignores it. Rows of rehearsals never lie in RESULTS_FOLDER.
REHEARSALS_FOLDER = Path("build") / "rehearsals"
# Units with a row of these outcomes are not run again.
_FINISHED = ("done", "absent")

# Rows of all units (those of earlier runs included), results of this run, device -> Markdown.
Report = Callable[[Sequence[Mapping[str, Any]], Sequence[Result], str], str]


def add_run_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of every run of units."""
    parser.add_argument("--out", type=output_file, help="file of JSON lines to append rows to")
    parser.add_argument(
        "--time-limit", type=positive_float, default=TIME_LIMIT_S, metavar="S", help="in seconds"
    )
    parser.add_argument("--seed", type=seed_number, help="of the inputs; drawn if left out")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run units that have a row of this commit and device in --out",
    )
    parser.add_argument("--commit", help="for the rows, where the code is no git checkout")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run tiny shapes with interpreted kernels on any device, to test the program; rows "
        f"are marked, and --out is in {REHEARSALS_FOLDER} if left out",
    )
    parser.add_argument("--list", action="store_true", help="print the units and end")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only units with this text in a line of --list"
    )


class UnitRun:
    """One run of a benchmark's units.

    Args:
        benchmark: Module name, for the rows.
        group_key: Units share a process only where it gives the same value.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        *,
        benchmark: str,
        list_units: ListUnits,
        group_key: Callable[[Unit], object],
    ) -> None:
        self._arguments = arguments
        self._benchmark = benchmark
        self._group_key = group_key
        self._started = time.monotonic()
        self._commit = arguments.commit or commit_hash()
        self._out = _output_file(arguments)
        self._device: Mapping[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._results: list[Result] = []
        self._units = [
            unit
            for unit in list_units(is_rehearsal=arguments.rehearse)
            if unit.kind == "machine" or arguments.only in unit.key
        ]
        if not any(arguments.only in unit.key for unit in self._units):
            raise BenchmarkError(f"--only {arguments.only} is in no line of --list.")
        self._logs = Path(tempfile.mkdtemp(prefix="paxkv_units_"))
        self._seed = secrets.randbits(30) if arguments.seed is None else arguments.seed
        self._runner = UnitRunner(
            folder=self._logs,
            list_units=list_units,
            run_seed=self._seed,
            is_rehearsal=arguments.rehearse,
            on_result=self._take,
        )

    def run(self, report: Report) -> int:
        """Runs what there is time for, then writes and prints the report.

        Ctrl-C and SIGTERM end the run early; the report of the finished units is still written.

        Returns:
            The exit code: 0 if every unit ran, 1 if something of ours was wrong, failed or died,
            2 without a GPU, 3 if units are left for the next run.
        """
        if self._arguments.list:
            print("\n".join(unit.key for unit in self._units))
            return 0
        print(f"seed {self._seed}, rows to {self._out}, logs in {self._logs}", flush=True)
        deadline = self._started + self._arguments.time_limit - REPORT_S
        self._runner.run_groups([[DEVICE_UNIT]], deadline=deadline)
        if self._device.get("platform") != "gpu" and not self._arguments.rehearse:
            print(
                f"no GPU: JAX has the platform {self._device.get('platform')!r}. Install "
                "jax[cuda13], or pass --rehearse to try the program with tiny shapes."
            )
            return NO_GPU_EXIT
        drop_unfinished_line(self._out)
        finished = set() if self._arguments.again else self._read_finished()
        units = [unit for unit in self._units if unit.key not in finished]
        if finished:
            print(f"{len(self._units) - len(units)} units have a row already", flush=True)
        sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
        num_checking = min(MAX_CHECKING_AT_ONCE, num_usable_processors())
        try:
            for kind, stage in itertools.groupby(units, key=lambda unit: unit.kind):
                self._runner.run_groups(
                    groups_of(list(stage), self._group_key),
                    deadline=deadline,
                    num_at_once=num_checking if kind == "check" else 1,
                )
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            signal.signal(signal.SIGTERM, sigterm)
        text = report(self._rows, self._results, self._device["device"])
        has_run = {result.unit.key for result in self._results}
        return self._finish(text, [unit for unit in units if unit.key not in has_run])

    def _finish(self, text: str, left: Sequence[Unit]) -> int:
        if left:
            text += "\n\n" + left_section(left)
        self._out.with_suffix(".md").write_text(text + "\n")
        print(text, flush=True)
        if any(result.is_our_fault for result in self._results):
            return 1
        return UNFINISHED_EXIT if left else 0

    def _read_finished(self) -> set[str]:
        """Keys of units with a row of the same commit, device and kind of run; keeps the rows."""
        lines = self._out.read_text().splitlines() if self._out.is_file() else []
        written = [json.loads(line) for line in lines]
        same = {
            "commit": self._commit,
            "device": self._device["device"],
            REHEARSAL: True if self._arguments.rehearse else None,
        }
        known = {unit.key for unit in self._units}
        found = [
            row
            for row in written
            if all(row.get(name) == value for name, value in same.items())
            and row.get("unit") in known
            and row.get("outcome") in _FINISHED
        ]
        self._rows += found
        return {row["unit"] for row in found}

    def _take(self, result: Result) -> None:
        if result.unit.key == DEVICE_UNIT.key:
            if result.measured is None:
                print(f"no device: {result.reason}", flush=True)
            else:
                self._device = result.measured.details
            return
        if result.outcome == "skipped":
            return
        self._results.append(result)
        details: dict[str, Any] = {"commit": self._commit}
        if self._arguments.rehearse:
            details[REHEARSAL] = True
        rows = unit_rows(result, self._benchmark, self._device["device"], details)
        append_rows(rows, self._out)
        self._rows += [row.as_dict() for row in rows]
        note = "WRONG" if result.wrong else result.outcome
        passed_s = time.monotonic() - self._started
        print(f"{passed_s:6.1f} s  {note:8} {result.unit.key}  {result.took_s:.1f} s", flush=True)


def _output_file(arguments: argparse.Namespace) -> Path:
    """The file of the rows, which both commands for a GPU share if --out is left out.

    Raises:
        BenchmarkError: Rows of a rehearsal would lie among results, or it cannot run here.
    """
    if not arguments.rehearse:
        return arguments.out or RESULTS_FOLDER / "gpu.jsonl"
    if num_usable_processors() < 2:
        raise BenchmarkError(
            "--rehearse needs 2 processors, because threads of an interpreted kernel wait for each "
            "other; this process may use 1. Allow it to use more."
        )
    out: Path = arguments.out or REHEARSALS_FOLDER / "gpu.jsonl"
    if out.resolve().is_relative_to(RESULTS_FOLDER):
        raise BenchmarkError(
            f"--out {out} is in {RESULTS_FOLDER}, where only measured rows belong. Leave --out out "
            "or choose another folder for the rows of a rehearsal."
        )
    return out


def num_usable_processors() -> int:
    """Processors that this process may use; `taskset` may leave it fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def left_section(units: Sequence[Unit]) -> str:
    """Markdown: the units that have not run, those of one op and body in one line."""
    families: dict[str, list[str]] = {}
    for unit in units:
        families.setdefault(f"{unit.kind}|{unit.op}|*|{unit.body}", []).append(unit.case)
    lines = [f"- {name}: {len(cases)} ({'; '.join(cases)})" for name, cases in families.items()]
    head = f"## Left\n\nThe same command runs these {len(units)} units if they have no row yet."
    return "\n".join([head, "", *lines])


def groups_of(units: Sequence[Unit], key: Callable[[Unit], object]) -> list[list[Unit]]:
    """Units in order, `MAX_UNITS_PER_GROUP` or fewer per process, because a start takes time."""
    runs = (list(run) for _, run in itertools.groupby(units, key=key))
    size = MAX_UNITS_PER_GROUP
    return [run[start : start + size] for run in runs for start in range(0, len(run), size)]


def unit_rows(
    result: Result, benchmark: str, device: str, details: Mapping[str, Any]
) -> list[ResultRow]:
    """A row per figure, or one row without values if there is none."""
    unit, measured = result.unit, result.measured
    details = {**details, "unit": unit.key, "outcome": result.outcome, "seed": result.seed}
    if measured is None:
        details["reason"] = result.reason
    else:
        wrong = [f"{finding.what} {finding.error:.1e}" for finding in result.wrong]
        details |= {"is_right": not wrong, "wrong": wrong, **measured.details}
    return [
        ResultRow(
            benchmark=benchmark,
            case=f"{unit.op}, {unit.case}, {unit.body}",
            metric=metric,
            values=values,
            device=device,
            details=details,
        )
        for metric, values in ((measured and measured.figures) or {"none": ()}).items()
    ]
