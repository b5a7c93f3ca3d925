"""A run of three units, of which the second waits; for a test that kills the run.

    python -m tests.benchmarks.units.waiting_units FOLDER --rehearse --out FILE

The waiting unit locks FOLDER/lock, writes FOLDER/started, and ends only if FOLDER/go exists.
"""

import argparse
import fcntl
import functools
import os
import sys
import time
from pathlib import Path

from benchmarks.units.run import UnitRun, add_run_arguments
from benchmarks.units.unit import Measured, Unit

FOLDER_VARIABLE = "WAITING_UNITS_FOLDER"


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    return [
        Unit(kind="time", op="op", case=c, body="ours", measure=functools.partial(_measure, c))
        for c in ("first", "waits", "last")
    ]


def _measure(case: str, _: int) -> Measured:
    folder = Path(os.environ[FOLDER_VARIABLE])
    if case == "waits":
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "started").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
    return Measured(figures={"x_ms": [1.0], "y_ms": [2.0]})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    add_run_arguments(parser)
    arguments = parser.parse_args()
    os.environ[FOLDER_VARIABLE] = arguments.folder
    run = UnitRun(
        arguments, benchmark="benchmarks.x", list_units=all_units, group_key=lambda unit: 0
    )
    return run.run(lambda rows, device: f"{len(rows)} rows")


if __name__ == "__main__":
    sys.exit(main())
