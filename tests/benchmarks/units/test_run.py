"""Rows are written as units finish; a resumed run does only what is left."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.units import run as run_module
from benchmarks.units.run import NO_GPU_EXIT, UNFINISHED_EXIT, Stage, UnitRun, add_run_arguments
from benchmarks.units.unit import Measured, Result
from tests.benchmarks.units.listed_units import all_units


class FakeRunner:
    """Finishes units in this process; units past the first `num_done` have no time."""

    platform = "gpu"
    num_done = 99

    def __init__(self, *, on_result, **_: object) -> None:
        self._on_result = on_result

    def run_groups(self, groups, *, deadline: float, num_at_once: int = 1) -> None:
        for unit in (unit for group in groups for unit in group):
            if unit.op == "device":
                details = {"device": "H200", "platform": self.platform, "jax": "1"}
                measured = Measured(figures={}, details=details)
                self._on_result(Result(unit=unit, outcome="done", measured=measured))
            elif FakeRunner.num_done <= 0:
                self._on_result(Result(unit=unit, outcome="skipped", reason="out of time"))
            elif unit.case == "raises":
                self._on_result(Result(unit=unit, outcome="failed", reason="ValueError: no"))
            else:
                FakeRunner.num_done -= 1
                self._on_result(Result(unit=unit, outcome="done", measured=unit.measure(0)))

    def stop(self) -> None:
        raise AssertionError("nobody stops this run")


@pytest.fixture
def finished(tmp_path: Path, monkeypatch):
    """Runs cases with flags; returns the exit code, the new rows and all rows of the run."""
    monkeypatch.setattr(run_module, "UnitRunner", FakeRunner)
    out = tmp_path / "rows.jsonl"

    def finish(cases: list[str], *flags: str, num_done: int = 99):
        monkeypatch.setattr(FakeRunner, "num_done", num_done)
        parser = argparse.ArgumentParser()
        add_run_arguments(parser, time_limit_s=60.0)
        arguments = parser.parse_args(["--out", str(out), "--logs", str(tmp_path / "logs"), *flags])
        before = out.read_text().splitlines() if out.is_file() else []
        run = UnitRun(arguments, benchmark="benchmarks.x", listed_by="x:y", default_out="x.jsonl")
        units = [unit for unit in all_units(is_rehearsal=False) if unit.case in cases]
        code = run.run([Stage(groups=[units])])
        code = run.finish("# Report") if code is None else code
        after = out.read_text().splitlines() if out.is_file() else []
        return code, [json.loads(line) for line in after[len(before) :]], list(run.rows)

    return finish


def test_rows_have_the_format_of_all_benchmarks(finished) -> None:
    code, rows, _ = finished(["first", "raises"], "--commit", "abc", "--seed", "7")
    first, failed = rows
    assert code == 1
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    assert (first["device"], first["commit"], first["case"]) == ("H200", "abc", "op, first, ours")
    assert (first["outcome"], first["is_right"]) == ("done", True)
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: no")
    assert "median" not in failed and failed["num_repetitions"] == 0


def test_wrong_result_fails_the_run(finished) -> None:
    code, (row,), _ = finished(["wrong"])
    assert code == 1 and row["is_right"] is False and row["wrong"] == ["out 1.0e+00"]


def test_resumed_run_does_what_is_left_and_reports_all(finished) -> None:
    code, rows, _ = finished(["first", "last"], num_done=1)
    assert (code, [row["outcome"] for row in rows]) == (UNFINISHED_EXIT, ["done", "skipped"])
    code, rows, all_rows = finished(["first", "last"], "--resume")
    assert (code, [row["case"] for row in rows]) == (0, ["op, last, ours"])
    assert [row["case"] for row in all_rows] == ["op, first, ours", "op, last, ours"]
    # Without the flag, and for another commit, every unit is measured again.
    assert len(finished(["first", "last"])[1]) == 2
    assert len(finished(["first", "last"], "--resume", "--commit", "other")[1]) == 2


def test_rehearsed_rows_are_marked_and_do_not_count_as_measured(finished) -> None:
    assert finished(["first"], "--rehearse")[1][0]["rehearsal"] is True
    assert len(finished(["first"], "--resume")[1]) == 1
    assert finished(["first"], "--resume", "--rehearse")[1] == []


def test_without_a_gpu_nothing_runs(finished, monkeypatch, capsys) -> None:
    monkeypatch.setattr(FakeRunner, "platform", "cpu")
    assert finished(["first"])[:2] == (NO_GPU_EXIT, [])
    assert "no GPU: JAX has the platform 'cpu'" in capsys.readouterr().out
