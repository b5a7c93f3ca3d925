"""Rows are written as units finish; a resumed run does only what is left."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.units import run as run_module
from benchmarks.units.run import NO_GPU_EXIT, UNFINISHED_EXIT, UnitRun, add_run_arguments
from benchmarks.units.runner import run_unit
from benchmarks.units.unit import Measured, Result
from tests.benchmarks.units.listed_units import all_units


class FakeRunner:
    """Runs units in this process; after `num_done` of them it is interrupted."""

    platform = "gpu"
    num_done = 99

    def __init__(self, *, on_result, **_: object) -> None:
        self._on_result = on_result

    def run_groups(self, groups, *, deadline: float, num_at_once: int = 1) -> None:
        for unit in (unit for group in groups for unit in group):
            if unit.op == "device":
                details = {"device": "H200", "platform": self.platform}
                measured = Measured(figures={}, details=details)
                self._on_result(Result(unit=unit, outcome="done", measured=measured))
                continue
            if FakeRunner.num_done <= 0:
                raise KeyboardInterrupt
            FakeRunner.num_done -= 1
            self._on_result(Result(unit=unit, **run_unit(unit, 1)))


def list_some(*, is_rehearsal: bool):
    cases = ("first", "raises", "wrong", "last")
    return [unit for unit in all_units(is_rehearsal=is_rehearsal) if unit.case in cases]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch):
    """Runs the units with flags; returns the exit code, the new rows and all rows of the run."""
    monkeypatch.setattr(run_module, "UnitRunner", FakeRunner)
    out = tmp_path / "rows.jsonl"

    def finish(*flags: str, num_done: int = 99):
        monkeypatch.setattr(FakeRunner, "num_done", num_done)
        parser = argparse.ArgumentParser()
        add_run_arguments(parser)
        before = len(out.read_text().splitlines()) if out.is_file() else 0
        run = UnitRun(
            parser.parse_args(["--out", str(out), "--logs", str(tmp_path / "logs"), *flags]),
            benchmark="benchmarks.x",
            list_units=list_some,
            group_key=lambda unit: unit.body,
        )
        reported = []
        code = run.run(lambda rows, results, device: reported.extend(rows) or f"# On {device}")
        lines = out.read_text().splitlines() if out.is_file() else []
        return code, [json.loads(line) for line in lines[before:]], reported

    return finish


def test_rows_have_the_format_of_all_benchmarks(finished, capsys) -> None:
    code, (first, failed, wrong, _), _ = finished("--commit", "abc", "--seed", "7")
    assert code == 1
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    assert (first["device"], first["commit"], first["case"]) == ("H200", "abc", "op, first, ours")
    assert (first["outcome"], first["is_right"]) == ("done", True)
    assert {"date", "versions", "command", "seed"} <= first.keys()
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: wrong length")
    assert "median" not in failed and failed["num_repetitions"] == 0
    assert wrong["is_right"] is False and wrong["wrong"] == ["out 1.0e+00"]
    assert "# On H200" in capsys.readouterr().out


def test_resumed_run_does_what_is_left_and_reports_all(finished) -> None:
    code, rows, _ = finished("--only", "st|", num_done=1)
    assert (code, [row["case"] for row in rows]) == (UNFINISHED_EXIT, ["op, first, ours"])
    code, rows, all_rows = finished("--only", "st|", "--resume")
    assert (code, [row["case"] for row in rows]) == (0, ["op, last, ours"])
    assert [row["case"] for row in all_rows] == ["op, first, ours", "op, last, ours"]
    # Every unit is measured again without the flag, for another commit, or if it failed.
    assert len(finished("--only", "st|")[1]) == 2
    assert len(finished("--only", "st|", "--resume", "--commit", "other")[1]) == 2
    assert [len(finished("--only", "raises", "--resume")[1]) for _ in range(2)] == [1, 1]
    # Rehearsed rows are marked and do not count as measured.
    rehearsed = ("--only", "first", "--commit", "third", "--rehearse")
    assert finished(*rehearsed)[1][0]["rehearsal"] is True
    assert finished(*rehearsed, "--resume")[1] == []
    assert len(finished("--only", "first", "--resume", "--commit", "third")[1]) == 1


def test_without_a_gpu_or_a_unit_nothing_runs(finished, monkeypatch, capsys) -> None:
    monkeypatch.setattr(FakeRunner, "platform", "cpu")
    assert finished()[:2] == (NO_GPU_EXIT, [])
    assert "no GPU: JAX has the platform 'cpu'" in capsys.readouterr().out
    with pytest.raises(BenchmarkError, match="--only nonsense"):
        finished("--only", "nonsense")
    assert finished("--list", "--only", "last") == (0, [], [])
    assert capsys.readouterr().out == "check|op|last|ours\n"
