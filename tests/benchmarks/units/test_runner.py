"""A crash or a hang costs its own unit; every unit has a result."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.units.runner import UnitRunner
from benchmarks.units.unit import Result
from benchmarks.units.worker import DEVICE_UNIT
from tests.benchmarks.units.listed_units import all_units


class Runs:
    """A runner of the units in listed_units.py."""

    def __init__(self, folder: Path, worker_module: str = "benchmarks.units.worker") -> None:
        self.results: list[Result] = []
        self.runner = UnitRunner(
            folder=folder,
            listed_by="tests.benchmarks.units.listed_units:all_units",
            run_seed=1,
            is_rehearsal=False,
            on_result=self.results.append,
            worker_module=worker_module,
        )

    def run(self, cases: Sequence[str], seconds: float = 600.0) -> dict[str, str]:
        units = {unit.case: unit for unit in (DEVICE_UNIT, *all_units(is_rehearsal=False))}
        group = [units[case] for case in cases]
        self.runner.run_groups([group], deadline=time.monotonic() + seconds)
        return {result.unit.case: result.outcome for result in self.results}

    def reason_of(self, case: str) -> str:
        return next(result.reason for result in self.results if result.unit.case == case)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_crash_and_hang_cost_their_own_unit_and_a_deadly_family_is_skipped(runs: Runs) -> None:
    outcomes = runs.run(
        ["name", "first", "kills", "raises", "kills again", "hangs", "last", "other"]
    )
    assert runs.results[0].measured.details["platform"] == "cpu"
    assert outcomes == {
        "name": "done",
        "first": "done",
        "kills": "died",
        "raises": "failed",
        "kills again": "died",
        "hangs": "died",
        "last": "skipped",
        "other": "done",
    }
    assert "illegal address" in runs.reason_of("kills")
    assert "no sign of life" in runs.reason_of("hangs")
    assert "killed 2 processes" in runs.reason_of("last")


def test_units_without_time_are_skipped_and_a_stopped_run_ends(runs: Runs) -> None:
    assert runs.run(["first"], seconds=-1) == {"first": "skipped"}
    runs.runner.stop()
    assert runs.run(["last"]) == {"first": "skipped", "last": "skipped"}
    assert runs.reason_of("last") == "out of time"


def test_worker_that_cannot_start_is_reported_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path, worker_module="benchmarks.no_such_worker")
    assert runs.run(["first", "last"]) == {"first": "died", "last": "died"}
    assert "no_such_worker" in runs.reason_of("first")
    assert len(list(tmp_path.glob("*.log"))) == 1
