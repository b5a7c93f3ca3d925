"""Runs units in order, and writes each result immediately. Skips units that have a row already."""

import argparse
import collections
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
    package_versions,
)
from benchmarks.units.runner import DEVICE_UNIT, ListUnits, UnitRunner
from benchmarks.units.unit import PEERS, Result, Unit

# The limit of a whole run. Its last `REPORT_S` seconds are reserved for ending processes and for
# the report.
TIME_LIMIT_S, REPORT_S = 530.0, 8.0
NO_GPU_EXIT, UNFINISHED_EXIT = 2, 3
# Most of a check is compilation on the host, so several run at once.
MAX_CHECKING_AT_ONCE = 6
MAX_UNITS_PER_GROUP = 12
_CHECKOUT = RESULTS_FOLDER.parents[1]
# Git ignores this folder. Inside the checkout, rows of rehearsals may only be here.
REHEARSALS_FOLDER = _CHECKOUT / "build" / "rehearsals"

# Makes the Markdown report. Arguments: rows of all units (earlier runs included), device name.
Report = Callable[[Sequence[Mapping[str, Any]], str], str]


def add_run_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of every run of units."""
    parser.add_argument("--out", type=output_file, help="file of JSON lines to append rows to")
    parser.add_argument(
        "--time-limit",
        type=_time_limit_s,
        default=TIME_LIMIT_S,
        metavar="S",
        help=f"limit of the run in seconds, more than {REPORT_S:g}",
    )
    parser.add_argument("--seed", type=seed_number, help="seed of the inputs; random by default")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also run units that have a result in --out for this commit, JAX and device",
    )
    parser.add_argument("--commit", help="the code's commit in the rows; by default, git's")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run tiny shapes with interpreted kernels on any device, to test this program; rows "
        f"are marked; the default of --out is in {REHEARSALS_FOLDER.relative_to(_CHECKOUT)}",
    )
    parser.add_argument("--list", action="store_true", help="only print the units")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only units with this text in --list"
    )


def _time_limit_s(text: str) -> float:
    """A type for `add_argument`: seconds that leave time for units."""
    value = positive_float(text)
    if value <= REPORT_S:
        raise argparse.ArgumentTypeError(
            f"must be more than {REPORT_S:g} seconds, which the report takes, got {text}"
        )
    return value


class UnitRun:
    """One run of a benchmark's units.

    Args:
        benchmark: Module name, for the rows.
        group_key: Units share a process only if this function returns the same value for them.
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
        # Code without a known commit may differ from one run to the next.
        self._is_code_known = bool(arguments.commit) or not self._commit.endswith(("unknown", "+"))
        self._out = _output_file(arguments)
        self._report_file = self._out.with_name(
            f"{self._out.stem}.{benchmark.rpartition('.')[2]}.md"
        )
        self._device: Mapping[str, Any] = {}
        self._device_reason = ""  # why there is no device
        self._rows: list[Mapping[str, Any]] = []
        self._ended_keys: set[str] = set()
        self._units = [
            unit
            for unit in list_units(is_rehearsal=arguments.rehearse)
            if unit.kind == "machine" or arguments.only in unit.key
        ]
        if not any(arguments.only in unit.key for unit in self._units):
            raise BenchmarkError(f"--only {arguments.only} matches no unit; see --list.")
        self._logs = Path(tempfile.mkdtemp(prefix="paxkv_units_"))
        self._seed = secrets.randbits(30) if arguments.seed is None else arguments.seed
        self._runner = UnitRunner(
            folder=self._logs,
            list_units=list_units,
            run_seed=self._seed,
            is_rehearsal=arguments.rehearse,
            on_result=self._add_result,
        )

    def run(self, report: Report) -> int:
        """Runs units until the time limit, then writes and prints the report.

        Ctrl-C and SIGTERM end the run early. The report of the finished units is still written.

        Returns:
            The exit code: 0 if every unit ran; 1 if the last row of a unit says that paxkv's code
            was wrong, failed or died; 2 without a GPU; 3 if units are left for the next run.

        Raises:
            BenchmarkError: JAX's device is not known.
        """
        if self._arguments.list:
            print("\n".join(unit.key for unit in self._units))
            return 0
        print(f"seed {self._seed}, rows to {self._out}, logs in {self._logs}", flush=True)
        if not self._is_code_known:
            print(f"This run cannot be continued: {self._unknown_code()}", flush=True)
        deadline = self._started + self._arguments.time_limit - REPORT_S
        self._runner.run_groups([[DEVICE_UNIT]], deadline=deadline)
        if not self._device:
            raise BenchmarkError(
                f"JAX's device is not known: {self._device_reason}. Read the log in {self._logs}, "
                "or allow more time with --time-limit."
            )
        if self._device["platform"] != "gpu" and not self._arguments.rehearse:
            print(
                f"no GPU: JAX has the platform {self._device['platform']!r}. Install "
                "jax[cuda13], or pass --rehearse to try the program with tiny shapes."
            )
            return NO_GPU_EXIT
        drop_unfinished_line(self._out)
        self._rows += self._read_rows()
        is_again = self._arguments.again
        done = {row["unit"] for row in last_rows(self._rows) if row["outcome"] == "done"}
        units = [unit for unit in self._units if is_again or unit.key not in done]
        if len(units) < len(self._units):
            print(f"{len(self._units) - len(units)} units have a row already", flush=True)
        num_deaths = collections.Counter(
            row["unit"] for row in self._rows if row["outcome"] == "died"
        )
        sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
        num_checking = min(MAX_CHECKING_AT_ONCE, num_usable_processors())
        try:
            for kind, of_stage in itertools.groupby(units, key=lambda unit: unit.kind):
                # A few crashes end a group. If the same units crashed first in every run, the units
                # after them would never run.
                stage = sorted(of_stage, key=lambda unit: num_deaths[unit.key])
                self._runner.run_groups(
                    groups_of(stage, self._group_key),
                    deadline=deadline,
                    num_at_once=num_checking if kind == "check" else 1,
                )
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            signal.signal(signal.SIGTERM, sigterm)
        title = self._device["device"] + (" (rehearsal)" if self._arguments.rehearse else "")
        rows = last_rows(self._rows)
        left = [unit for unit in units if unit.key not in self._ended_keys]
        return self._finish(report(rows, title), rows, left)

    def _finish(self, text: str, rows: Sequence[Mapping[str, Any]], left: Sequence[Unit]) -> int:
        if left:
            note = "" if self._is_code_known else f" It repeats all units: {self._unknown_code()}"
            text += "\n\n" + left_section(left, note)
        self._report_file.write_text(text + "\n")
        print(text, flush=True)
        if any(is_our_fault(row) for row in rows):
            return 1
        return UNFINISHED_EXIT if left else 0

    def _unknown_code(self) -> str:
        return (
            f"the code's commit is not known ({self._commit!r}), so a later run ignores its rows. "
            "Commit the changes, or pass --commit ID."
        )

    def _read_rows(self) -> list[Mapping[str, Any]]:
        """Earlier rows of these units, with the same commit, JAX, device and kind of run."""
        if not self._is_code_known or not self._out.is_file():
            return []
        same = {
            "commit": self._commit,
            "device": self._device["device"],
            REHEARSAL: True if self._arguments.rehearse else None,
        }
        known, jax_version = {unit.key for unit in self._units}, package_versions()["jax"]
        return [
            row
            for row in map(json.loads, self._out.read_text().splitlines())
            if all(row.get(name) == value for name, value in same.items())
            and row["versions"]["jax"] == jax_version
            and row.get("unit") in known
        ]

    def _add_result(self, result: Result) -> None:
        if result.unit.key == DEVICE_UNIT.key:
            if result.measured is None:
                self._device_reason = result.reason
            else:
                self._device = result.measured.details
            return
        if result.outcome == "skipped":
            return
        self._ended_keys.add(result.unit.key)
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
    """The file of the rows. By default, both GPU benchmarks use the same file.

    Raises:
        BenchmarkError: Rows may not be written to the file, or a rehearsal cannot run here.
    """
    folder = REHEARSALS_FOLDER if arguments.rehearse else RESULTS_FOLDER
    out: Path = arguments.out or folder / "gpu.jsonl"
    if out.suffix == ".md":
        raise BenchmarkError(
            f"--out {out} ends in .md, as reports do, but it is a file of JSON lines. Choose "
            f"another name, such as {out.with_suffix('.jsonl')}."
        )
    if not arguments.rehearse:
        return out
    if num_usable_processors() < 2:
        raise BenchmarkError(
            "--rehearse needs 2 processors, because threads of an interpreted kernel wait for each "
            "other; this process may use 1. Allow it to use more."
        )
    place = out.resolve()
    if place.is_relative_to(_CHECKOUT) and not place.is_relative_to(REHEARSALS_FOLDER):
        raise BenchmarkError(
            f"--out {out} is in the checkout, where rows of a rehearsal may only be in "
            f"{REHEARSALS_FOLDER}. Omit --out, or choose a file there or outside the checkout."
        )
    return out


def num_usable_processors() -> int:
    """Processors that this process may use. `taskset` can limit them."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def last_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of each unit's last run: one per metric, or one with the metric "none"."""
    of_units: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        of_unit = of_units.setdefault(row["unit"], {})
        if row["metric"] in of_unit or "none" in (row["metric"], *of_unit):
            of_unit.clear()
        of_unit[row["metric"]] = row
    return [row for of_unit in of_units.values() for row in of_unit.values()]


def is_our_fault(row: Mapping[str, Any]) -> bool:
    """Whether a row says that paxkv's code was wrong, failed or died."""
    is_bad = row["outcome"] in ("failed", "died") or row.get("is_right") is False
    return is_bad and row["unit"].rpartition("|")[2] not in PEERS


def left_section(units: Sequence[Unit], note: str) -> str:
    """Markdown: the units that have not run, one line per op and body."""
    families: dict[str, list[str]] = {}
    for unit in units:
        families.setdefault(f"{unit.kind}|{unit.op}|*|{unit.body}", []).append(unit.case)
    lines = [f"- {name}: {len(cases)} ({'; '.join(cases)})" for name, cases in families.items()]
    head = f"## Left\n\nThe same command runs these {len(units)} units.{note}"
    return "\n".join([head, "", *lines])


def groups_of(units: Sequence[Unit], key: Callable[[Unit], object]) -> list[list[Unit]]:
    """Groups units in order, for one process per group.

    A group has several units, because the start of a process takes time. It has at most
    `MAX_UNITS_PER_GROUP`, and all of them have the same `key`.
    """
    runs = (list(run) for _, run in itertools.groupby(units, key=key))
    size = MAX_UNITS_PER_GROUP
    return [run[start : start + size] for run in runs for start in range(0, len(run), size)]


def unit_rows(
    result: Result, benchmark: str, device: str, details: Mapping[str, Any]
) -> list[ResultRow]:
    """Returns a row for each figure, or one row without values if there is no figure."""
    unit, measured = result.unit, result.measured
    details = {**details, "unit": unit.key, "outcome": result.outcome, "seed": result.seed}
    if measured is None:
        details["reason"] = result.reason
    else:
        wrong = [f"{f.what} {f.error:.2g} (limit {f.limit:.0e})" for f in result.wrong]
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
