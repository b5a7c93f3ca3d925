"""Checked flags and one-line errors, for the command lines of all benchmarks."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from paxkv.entrypoints.command_end import run_command
from paxkv.errors import PaxkvError


class BenchmarkError(ValueError):
    """The request cannot be measured; the message says why and what to do."""


def run_benchmark(main: Callable[[], int | None], *refusals: type[Exception]) -> int:
    """Runs a benchmark's `main`; returns the exit code of the process.

    Args:
        refusals: Further types of errors that are printed in one line, without a traceback.
    """

    def run() -> int | None:
        try:
            return main()
        except (BenchmarkError, PaxkvError, *refusals) as error:
            print(f"benchmarks: error: {error}", file=sys.stderr)
            return 1

    return run_command(run)


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for `add_argument`: an integer in `[low, high]`."""
    wanted = f"of at least {low}" if high is None else f"in [{low}, {high}]"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be an integer {wanted}, got {text}")
        return value

    return read


positive_int = whole_number(1)
natural = whole_number(0)
# The range of NumPy's RandomState.
seed_number = whole_number(0, 2**32 - 1)


def positive_float(text: str) -> float:
    """A type for `add_argument`: a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def natural_float(text: str) -> float:
    """A type for `add_argument`: a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def output_file(text: str) -> Path:
    """A type for `add_argument`: a file that can be appended to. Its folder is created.

    Checked immediately, so that the error does not come after the measurement.
    """
    _try_to_append(Path(text), named=text)
    return Path(text)


def output_folder(text: str) -> Path:
    """A type for `add_argument`: a folder that can be written into, which is created."""
    _try_to_append(Path(text) / ".writable", named=text)
    return Path(text)


def _try_to_append(file: Path, *, named: str) -> None:
    is_new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{named} cannot be written: {error.strerror}. Choose another place"
        ) from error
