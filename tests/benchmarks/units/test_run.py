"""Rows are written as units finish; a second run does only what is left."""

import argparse
import fcntl
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.result_rows import RESULTS_FOLDER
from benchmarks.units import run as run_module
from benchmarks.units.run import (
    NO_GPU_EXIT,
    REHEARSALS_FOLDER,
    UNFINISHED_EXIT,
    UnitRun,
    add_run_arguments,
    last_rows,
)
from benchmarks.units.runner import UnitRunner, run_unit
from benchmarks.units.unit import Measured, Result
from tests.benchmarks.units.listed_units import all_units


def list_some(**settings):
    cases = ("first", "raises", "absent", "wrong", "last")
    return [unit for unit in all_units(**settings) if unit.case in cases]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch):
    """Runs units in this process; returns exit code, new rows, and the reported rows."""
    out = tmp_path / "rows.jsonl"
    out.touch()

    def finish(
        *flags: str,
        num_done: int = 99,
        platform: str | None = "gpu",
        died: Sequence[str] = (),
        commit: str = "abc",
    ):
        monkeypatch.setattr(run_module, "commit_hash", lambda: commit)

        def run_groups(runner: UnitRunner, groups, **_: object) -> None:
            nonlocal num_done
            for unit in itertools.chain(*groups):
                fields = run_unit(unit, 1)
                if unit.case in died:
                    fields = {"outcome": "died", "reason": "illegal address"}
                if unit.op == "device" and platform is None:
                    fields = {"outcome": "failed", "reason": "RuntimeError: no driver"}
                elif unit.op == "device":
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
        code = run.run(lambda rows, device: reported.extend(rows) or f"# On {device}")
        new = out.read_text().splitlines()[num_before:]
        return code, [json.loads(line) for line in new], reported

    return finish


def test_rows_have_the_format_of_all_benchmarks(finished, capsys) -> None:
    code, (first, failed, _, wrong, _), _ = finished("--commit", "abc", "--seed", "7")
    assert code == 1
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    assert (first["device"], first["commit"], first["case"]) == ("H200", "abc", "op, first, ours")
    assert (first["outcome"], first["is_right"]) == ("done", True)
    assert {"date", "seed"} <= first.keys() and first["versions"]["jax"]
    assert first["command"].startswith("python -m benchmarks.x")
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: wrong length")
    assert "median" not in failed and failed["num_repetitions"] == 0
    assert wrong["is_right"] is False and wrong["wrong"] == ["out 1 (limit 5e-01)"]
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
    assert [len(finished("--only", "absent")[1]) for _ in range(2)] == [1, 1]
    # Rehearsed rows are marked and do not count as measured.
    rehearsed = ("--only", "first", "--commit", "third", "--rehearse")
    assert finished(*rehearsed)[1][0]["rehearsal"] is True
    assert finished(*rehearsed)[1] == []
    assert len(finished("--only", "first", "--commit", "third")[1]) == 1


def test_rows_of_other_code_or_another_jax_do_not_count(finished, tmp_path, capsys) -> None:
    for commit in ("unknown", "abc+"):
        for _ in range(2):
            code, rows, reported = finished("--only", "st|", num_done=1, commit=commit)
            assert (code, len(rows), len(reported)) == (UNFINISHED_EXIT, 1, 1)
        note = f"It repeats all units: the code's commit is not known ('{commit}')"
        assert note in capsys.readouterr().out
        flags = ("--only", "first", "--commit", f"{commit} named")
        assert [len(finished(*flags, commit=commit)[1]) for _ in range(2)] == [1, 0]
    assert [len(finished("--only", "first")[1]) for _ in range(2)] == [1, 0]
    out = tmp_path / "rows.jsonl"
    out.write_text(out.read_text().replace(f'"jax": "{jax.__version__}"', '"jax": "0.0.1"'))
    assert len(finished("--only", "first")[1]) == 1


def test_units_that_died_run_last_the_next_time(finished) -> None:
    def order(*died: str) -> list[str]:
        return [row["case"].split(", ")[1] for row in finished("--only", "st|", died=died)[1]]

    assert order("first", "last") == ["first", "last"]
    assert order("first", "last") == ["first", "last"]
    # The unit that died more often is the last.
    finished("--only", "first", died=("first",))
    assert order("first", "last") == ["last", "first"]
    assert order("last") == ["last", "first"]
    assert order() == ["last"]


def test_problems_of_earlier_runs_count_until_a_unit_runs_again(finished) -> None:
    for num_new in (1, 0):
        code, rows, reported = finished("--only", "wrong")
        assert (code, len(rows)) == (1, num_new)
        assert [row["is_right"] for row in reported] == [False]
    assert finished("--only", "last", died=("last",))[0] == 1
    code, rows, reported = finished("--only", "last", num_done=0)
    assert (code, rows, [row["outcome"] for row in reported]) == (1, [], ["died"])
    code, _, reported = finished("--only", "last")
    assert (code, [row["outcome"] for row in reported]) == (0, ["done"])


def test_last_rows_come_from_the_last_run_of_each_unit() -> None:
    def rows(unit: str, *metrics: str, run: int) -> list[dict[str, object]]:
        return [{"unit": unit, "metric": metric, "run": run} for metric in metrics]

    last = [*rows("a", "x", "y", run=2), *rows("b", "x", run=2), *rows("c", "none", run=1)]
    earlier = [*rows("a", "x", "y", run=1), *rows("b", "none", run=1), *rows("c", "x", run=0)]
    assert last_rows([*earlier, *last]) == last


def test_device_without_a_result_and_a_limit_without_time_end_the_run(finished, capsys) -> None:
    for flags in ((), ("--rehearse",)):
        with pytest.raises(BenchmarkError, match="device is not known: RuntimeError: no driver"):
            finished(*flags, platform=None)
    with pytest.raises(SystemExit):
        finished("--time-limit", "8")
    assert "must be more than 8 seconds, which the report takes, got 8" in capsys.readouterr().err


def test_report_is_named_after_the_benchmark_and_marked_if_rehearsed(finished, tmp_path) -> None:
    for flags, title in (((), "# On H200\n"), (("--rehearse",), "# On H200 (rehearsal)\n")):
        finished("--only", "first", *flags)
        assert (tmp_path / "rows.x.md").read_text() == title
    with pytest.raises(BenchmarkError, match=r"rows.md ends in .md, .* such as .*rows.jsonl"):
        finished("--out", str(tmp_path / "rows.md"))


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

    def start(folder: Path) -> None:
        arguments = parser.parse_args(["--rehearse", "--out", str(folder / "rehearsed.jsonl")])
        UnitRun(arguments, benchmark="b", list_units=list_some, group_key=lambda unit: 0)

    for folder in (RESULTS_FOLDER, RESULTS_FOLDER.parent, REHEARSALS_FOLDER.parents[1]):
        with pytest.raises(BenchmarkError, match="is in the checkout, where rows of a rehearsal"):
            start(folder)
        assert not (folder / "rehearsed.jsonl").exists()
    start(REHEARSALS_FOLDER)
    files = list(RESULTS_FOLDER.rglob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) > 1000 and not [row for row in rows if row.get("rehearsal")]


@pytest.mark.slow
def test_killed_run_leaves_no_process_and_the_next_one_repeats_no_unit(tmp_path) -> None:
    out, lock = tmp_path / "rows.jsonl", tmp_path / "lock"
    module = "tests.benchmarks.units.waiting_units"
    command = [sys.executable, "-m", module, str(tmp_path), "--rehearse", "--out", str(out)]
    command += ["--commit", "abc"]
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
            wait_for(lambda: out.is_file() and out.stat().st_size > 0)
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
