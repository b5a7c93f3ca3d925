"""What dies or hangs costs its own unit; every unit has a result, whatever happens."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ops import gpu_processes
from benchmarks.ops.gpu_processes import Result, UnitRunner
from benchmarks.ops.gpu_units import Unit

# Does what the case's name says; speaks as gpu_worker.py does.
WORKER = """
import argparse, json, os, time
parser = argparse.ArgumentParser()
for name in ("--units", "--events", "--seed"):
    parser.add_argument(name)
parser.add_argument("--serial", action="store_true")
arguments = parser.parse_args()
keys = json.load(open(arguments.units))
out = open(arguments.events, "a")
def write(event, **fields):
    out.write(json.dumps({"event": event, **fields}) + "\\n")
    out.flush()
write("device", device="a device", platform="gpu")
if not arguments.serial and any("kills the compiler" in key for key in keys):
    print("compiler: assertion failed", flush=True)
    os.abort()
for key in keys:
    write("start", unit=key)
    if "kills" in key:
        print("illegal address", flush=True)
        os.abort()
    if "hangs" in key:
        time.sleep(1000)
    if "slow" in key:
        time.sleep(0.5)
    if "raises" in key:
        write("failed", unit=key, reason="ValueError: no")
    else:
        write("done", unit=key, serial=arguments.serial)
"""


def make_unit(case: str, body: str = "mosaic_gpu", kind: str = "check", **fields) -> Unit:
    return Unit(kind=kind, op="op", case=case, body=body, **fields)


class Runs:
    """A runner of the worker above, and what came of its units."""

    def __init__(self, folder: Path) -> None:
        self.results: list[Result] = []
        self.devices: list[dict] = []
        self.runner = UnitRunner(
            folder=folder,
            run_seed=1,
            worker_options=[],
            on_result=self.results.append,
            on_device=self.devices.append,
            worker_module="fake_worker",
        )

    def run(self, *units: Unit) -> dict[str, str]:
        self.runner.run_groups([units], deadline=time.monotonic() + 600, num_at_once=1)
        return {result.unit.case: result.outcome for result in self.results}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> Runs:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Runs(tmp_path)


def test_units_around_a_crash_are_done(runs: Runs) -> None:
    units = [make_unit(case) for case in ("first", "kills", "raises", "last")]
    outcomes = runs.run(*units)
    assert outcomes == {"first": "done", "kills": "died", "raises": "failed", "last": "done"}
    (died,) = (result for result in runs.results if result.outcome == "died")
    assert "illegal address" in died.reason
    # Nothing suggests the compiler: the rest may be compiled side by side again.
    assert not any(r.fields["serial"] for r in runs.results if r.outcome == "done")
    assert runs.devices[0]["platform"] == "gpu"


def test_a_hang_is_ended(runs: Runs) -> None:
    outcomes = runs.run(make_unit("hangs", silence_limit_s=0.5), make_unit("last"))
    assert outcomes == {"hangs": "died", "last": "done"}
    assert "no sign of life" in runs.results[0].reason


def test_a_crash_of_the_compiler_is_traced_to_its_unit(runs: Runs) -> None:
    outcomes = runs.run(make_unit("first"), make_unit("kills the compiler"), make_unit("last"))
    assert outcomes == {"first": "done", "kills the compiler": "died", "last": "done"}
    assert all(r.fields["serial"] for r in runs.results if r.outcome == "done")


def test_what_killed_two_processes_is_not_tried_again(runs: Runs) -> None:
    killers = [make_unit(f"kills {index}") for index in range(4)]
    outcomes = runs.run(*killers, make_unit("other", body="xla"))
    assert list(outcomes.values()).count("died") == 2
    assert list(outcomes.values()).count("skipped") == 2
    assert outcomes["other"] == "done"
    # Nor is it timed, after its checks killed two.
    assert runs.run(make_unit("timing", kind="time"))["timing"] == "skipped"


def test_units_without_time_are_skipped(runs: Runs, monkeypatch) -> None:
    shift_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + shift_s[0], sleep=time.sleep)
    monkeypatch.setattr(gpu_processes, "time", clock)
    take = runs.runner._on_result

    def take_and_pass_time(result: Result) -> None:
        take(result)
        shift_s[0] = 61.0

    runs.runner._on_result = take_and_pass_time
    units = [make_unit("first"), make_unit("hangs"), make_unit("last")]
    runs.runner.run_groups([units], deadline=time.monotonic() + 60, num_at_once=1)
    outcomes = {result.unit.case: result.outcome for result in runs.results}
    assert outcomes == {"first": "done", "hangs": "skipped", "last": "skipped"}
    assert runs.results[-1].reason == "out of time"


def test_a_worker_that_cannot_start_is_reported(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "fake_worker.py").write_text("raise ImportError('no such driver')")
    outcomes = runs.run(make_unit("first"), make_unit("last"))
    assert set(outcomes.values()) == {"died"}
    assert "no such driver" in runs.results[0].reason


def test_groups_run_side_by_side(runs: Runs) -> None:
    groups = [[make_unit(f"slow {index}")] for index in range(4)]
    runs.runner.run_groups(groups, deadline=time.monotonic() + 600, num_at_once=4)
    assert [result.outcome for result in runs.results] == ["done"] * 4


def test_a_run_that_is_stopped_ends_with_a_result_for_every_unit(runs: Runs) -> None:
    threading.Timer(1.0, runs.runner.stop).start()
    started = time.monotonic()
    outcomes = runs.run(make_unit("hangs"), make_unit("last"))
    assert outcomes == {"hangs": "skipped", "last": "skipped"}
    assert time.monotonic() - started < 120
