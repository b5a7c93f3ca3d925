"""Rows are written as units finish; a second run does only what is left."""

import argparse
import fcntl
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.result_rows import RESULTS_FOLDER
from benchmarks.units.run import NO_GPU_EXIT, UNFINISHED_EXIT, UnitRun, add_run_arguments
from benchmarks.units.runner import UnitRunner, run_unit
from benchmarks.units.unit import Measured, Result
from tests.benchmarks.units.listed_units import all_units


def list_some(**settings):
    cases = ("first", "raises", "wrong", "last")
    return [unit for unit in all_units(**settings) if unit.case in cases]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch):
    """Runs units in this process; returns exit code, new rows, and the reported rows."""
    out = tmp_path / "rows.jsonl"
    out.touch()

    def finish(*flags: str, num_done: int = 99, platform: str = "gpu"):
        def run_groups(runner: UnitRunner, groups, **_: object) -> None:
            nonlocal num_done
            for unit in itertools.chain(*groups):
                fields = run_unit(unit, 1)
                if unit.op == "device":
                    details = {"device": "H200", "platform": platform}
                    fields["measured"] = Measured(figures={}, details=details)
                elif num_done == 0:
                    raise KeyboardInterrupt
                else:
                    num_done -= 1
                runner._on_result(Result(unit=unit, **fields))

        monkeypatch.setattr(UnitRunner, "run_groups", run_groups)
        parser = argparse.ArgumentParser()
        add_run_arguments(parser)
        num_before, reported = len(out.read_text().splitlines()), []
        arguments = parser.parse_args(["--out", str(out), *flags])
        run = UnitRun(
            arguments, benchmark="benchmarks.x", list_units=list_some, group_key=lambda unit: 0
        )
        code = run.run(lambda rows, results, device: reported.extend(rows) or f"# On {device}")
        new = out.read_text().splitlines()[num_before:]
        return code, [json.loads(line) for line in new], reported

    return finish


def test_rows_have_the_format_of_all_benchmarks(finished, capsys) -> None:
    code, (first, failed, wrong, _), _ = finished("--commit", "abc", "--seed", "7")
    assert code == 1
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    assert (first["device"], first["commit"], first["case"]) == ("H200", "abc", "op, first, ours")
    assert (first["outcome"], first["is_right"]) == ("done", True)
    assert {"date", "seed"} <= first.keys() and first["versions"]["jax"]
    assert first["command"].startswith("python -m benchmarks.x")
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: wrong length")
    assert "median" not in failed and failed["num_repetitions"] == 0
    assert wrong["is_right"] is False and wrong["wrong"] == ["out 1.0e+00"]
    assert "# On H200" in capsys.readouterr().out


def test_second_run_does_what_is_left_and_reports_all(finished, capsys) -> None:
    code, rows, _ = finished("--only", "st|", num_done=1)
    assert (code, [row["case"] for row in rows]) == (UNFINISHED_EXIT, ["op, first, ours"])
    assert "- check|op|*|ours: 1 (last)" in capsys.readouterr().out
    code, rows, all_rows = finished("--only", "st|")
    assert (code, [row["case"] for row in rows]) == (0, ["op, last, ours"])
    assert [row["case"] for row in all_rows] == ["op, first, ours", "op, last, ours"]
    assert finished("--only", "st|")[1] == []
    # Units are measured again with --again, for another commit, or if they failed.
    assert len(finished("--only", "st|", "--again")[1]) == 2
    assert len(finished("--only", "st|", "--commit", "other")[1]) == 2
    assert [len(finished("--only", "raises")[1]) for _ in range(2)] == [1, 1]
    # Rehearsed rows are marked and do not count as measured.
    rehearsed = ("--only", "first", "--commit", "third", "--rehearse")
    assert finished(*rehearsed)[1][0]["rehearsal"] is True
    assert finished(*rehearsed)[1] == []
    assert len(finished("--only", "first", "--commit", "third")[1]) == 1


def test_without_a_gpu_or_a_unit_nothing_runs(finished, capsys) -> None:
    assert finished(platform="cpu")[:2] == (NO_GPU_EXIT, [])
    assert "no GPU: JAX has the platform 'cpu'" in capsys.readouterr().out
    with pytest.raises(BenchmarkError, match="--only nonsense"):
        finished("--only", "nonsense")
    assert finished("--list", "--only", "last") == (0, [], [])
    assert capsys.readouterr().out == "check|op|last|ours\n"


def test_rehearsed_rows_never_lie_among_results() -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    out = RESULTS_FOLDER / "rehearsed.jsonl"
    arguments = parser.parse_args(["--rehearse", "--out", str(out)])
    with pytest.raises(BenchmarkError, match="where only measured rows belong"):
        UnitRun(arguments, benchmark="b", list_units=list_some, group_key=lambda unit: 0)
    assert not out.exists()
    files = list(RESULTS_FOLDER.rglob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) > 1000 and not [row for row in rows if row.get("rehearsal")]


def test_killed_run_leaves_no_process_and_the_next_one_repeats_no_unit(tmp_path) -> None:
    out, lock = tmp_path / "rows.jsonl", tmp_path / "lock"
    module = "tests.benchmarks.units.waiting_units"
    command = [sys.executable, "-m", module, str(tmp_path), "--rehearse", "--out", str(out)]
    deadline = time.monotonic() + 300

    def wait_for(is_true: Callable[[], bool]) -> None:
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def is_unlocked() -> bool:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with subprocess.Popen(command) as killed:
        try:
            wait_for((tmp_path / "started").exists)
            assert not is_unlocked()
        finally:
            killed.kill()
    # The worker held the lock and ended with its parent.
    wait_for(is_unlocked)
    before = out.read_text()
    assert [json.loads(line)["case"] for line in before.splitlines()] == ["op, first, ours"] * 2
    # A machine that is lost may leave half a line.
    with out.open("a") as file:
        file.write('{"date": "2026')
    (tmp_path / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "1 units have a row already" in done.stdout and "6 rows" in done.stdout
    assert out.read_text().startswith(before)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["unit"].split("|")[2], row["metric"]) for row in rows] == [
        (case, metric) for case in ("first", "waits", "last") for metric in ("x_ms", "y_ms")
    ]
