"""A crash or a hang ends only its own unit; every unit has a result."""

import math
import re
import time
from pathlib import Path

import pytest

from benchmarks.units.run import is_our_fault, unit_rows
from benchmarks.units.runner import DEVICE_UNIT, UnitRunner
from benchmarks.units.unit import Finding, Result
from tests.benchmarks.units.listed_units import all_units


def run(folder: Path, *cases: str, seconds: float = 600.0, list_units=all_units):
    """Runs the cases of listed_units.py, or the device's unit "name", as one group."""
    results: list[Result] = []
    unit_runner = UnitRunner(
        folder=folder,
        list_units=list_units,
        run_seed=1,
        is_rehearsal=False,
        on_result=results.append,
    )
    units = {unit.case: unit for unit in (DEVICE_UNIT, *all_units(is_rehearsal=False))}
    unit_runner.run_groups([[units[case] for case in cases]], deadline=time.monotonic() + seconds)
    assert len(results) == len(cases)
    return {result.unit.case: result for result in results}


def test_a_crash_or_a_hang_ends_only_its_own_unit_and_the_third_one_its_group(tmp_path) -> None:
    cases = ("name", "first", "kills", "raises", "absent", "hangs", "nan", "kills again", "last")
    results = run(tmp_path, *cases)
    outcomes = [results[case].outcome for case in cases]
    assert outcomes[:7] == ["done", "done", "died", "failed", "absent", "died", "done"]
    # After the third unit that died, the rest of the group is skipped.
    assert outcomes[7:] == ["died", "skipped"]
    assert "too many units of the group crashed" in results["last"].reason
    assert results["name"].measured.details["platform"] == "cpu"
    assert "illegal address" in results["kills"].reason
    assert results["raises"].reason == "ValueError: wrong length"
    assert re.search(r"silent for \d+ of 1 s", results["hangs"].reason)
    # Inputs differ between units and are equal for an equal seed of the run.
    drawn = {results[case].measured.details["drawn"] for case in ("first", "nan")}
    assert drawn == {results["first"].unit.seed(1), results["nan"].unit.seed(1)} and len(drawn) == 2
    rows = {case: unit_rows(results[case], "b", "d", {})[0].as_dict() for case in cases}
    faults = {case for case, row in rows.items() if is_our_fault(row)}
    assert faults == {"kills", "raises", "hangs", "nan", "kills again"}


def broken_list(*, is_rehearsal: bool) -> list:
    raise RuntimeError("no list of units")


def test_process_that_cannot_start_is_reported_once(tmp_path) -> None:
    results = run(tmp_path, "first", "last", list_units=broken_list)
    assert {result.outcome for result in results.values()} == {"died"}
    assert "no list of units" in results["last"].reason
    assert len(list(tmp_path.glob("*.log"))) == 1
    # A group without time does not start.
    assert run(tmp_path, "first", seconds=-1)["first"].outcome == "skipped"


@pytest.mark.parametrize("error", [math.nan, math.inf, 1e-2, 0.5])
def test_nan_and_the_limit_itself_are_wrong(error: float) -> None:
    assert not Finding(what="out", error=error, limit=1e-2).is_right
    assert Finding(what="out", error=0.0, limit=0.0).is_right
