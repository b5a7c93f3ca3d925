"""The stored coverage run: which tests execute a line, and how long each test takes.

A folder of a coverage run holds:
    coverage.sqlite   coverage.py's data; its contexts are the ids of tests, or shared fixtures
    tests.json        the root of the tree, durations of tests and shared fixtures, and results
    compiled/         JAX's compilation cache as the run left it
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import coverage

STARTUP_FOLDER = Path(__file__).parent / "startup"
# These tests hardly execute paxkv; they cost more than half of the suite's time.
LEFT_OUT = ("tests/pallas_kernels", "tests/models", "tests/aot", "tests/benchmarks")

_CONFIG = """\
[run]
data_file = {data}
parallel = true
core = ctrace
include = {include}
disable_warnings = no-data-collected, module-not-imported, module-not-measured,
    already-imported, dynamic-conflict, no-sysmon, no-ctracer, include-ignored, trace-changed
"""


class Test(NamedTuple):
    """One test of the coverage run."""

    __test__ = False

    seconds: float
    set_up_seconds: float  # of fixtures that it shares with other tests, which may have paid for it
    is_usable: bool  # It passed: it can tell a mutant from the original.
    fixtures: tuple[str, ...]  # contexts of those fixtures

    @property
    def seconds_alone(self) -> float:
        return self.seconds + self.set_up_seconds


class CoveredLines:
    """What one coverage run has found."""

    def __init__(self, folder: Path) -> None:
        stored = json.loads((folder / "tests.json").read_text())
        self._root = stored["root"]
        fixture_seconds = stored["fixture_seconds"]
        self.tests = {
            name: Test(
                seconds,
                sum(fixture_seconds.get(fixture, 0.0) for fixture in fixtures),
                is_usable,
                tuple(fixtures),
            )
            for name, (seconds, is_usable, fixtures) in stored["tests"].items()
        }
        self._data = coverage.CoverageData(str(folder / "coverage.sqlite"))
        self._data.read()

    def tests_of_lines(self, path: str, lines: Iterable[int]) -> set[str]:
        """Ids of the tests that passed and execute one of the lines.

        Args:
            path: Relative to the root, such as "paxkv/kv_cache/block_pool.py".
        """
        contexts = self._contexts_of_lines(path)
        found: set[str] = set()
        for line in lines:
            for context in contexts.get(line, ()):
                found |= self._tests_of_context(context)
        return found

    def executed_lines(self, path: str) -> set[int]:
        """Lines of a file that a passing test executes."""
        contexts = self._contexts_of_lines(path)
        return {
            line
            for line, names in contexts.items()
            if any(self._tests_of_context(name) for name in names)
        }

    @functools.cache  # noqa: B019 there is one object per process
    def _contexts_of_lines(self, path: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(f"{self._root}/{path}")

    def _tests_of_context(self, context: str) -> frozenset[str]:
        test = self.tests.get(context)
        if test is not None:
            return frozenset([context]) if test.is_usable else frozenset()
        return self._users_of_fixtures.get(context, frozenset())

    @functools.cached_property
    def _users_of_fixtures(self) -> dict[str, frozenset[str]]:
        users: dict[str, set[str]] = {}
        for name, test in self.tests.items():
            if test.is_usable:
                for fixture in test.fixtures:
                    users.setdefault(fixture, set()).add(name)
        return {fixture: frozenset(names) for fixture, names in users.items()}


def measure(
    root: Path, folder: Path, packages: Sequence[str], pytest_arguments: Sequence[str]
) -> int:
    """Runs the tests of a tree once under coverage.py and stores the result; pytest's exit code.

    Args:
        packages: Folders whose lines are recorded, such as "paxkv/scheduler".
        pytest_arguments: In place of the whole suite without `LEFT_OUT`, by two workers.
    """
    shutil.rmtree(folder, ignore_errors=True)
    raw, tests = folder / "raw", folder / "raw_tests"
    for part in (raw, tests, folder / "compiled"):
        part.mkdir(parents=True)
    include = ", ".join(f"{root}/{package}/*" for package in packages)
    config_file = folder / "coverage.ini"
    config_file.write_text(_CONFIG.format(data=raw / "data", include=include))
    arguments = list(pytest_arguments) or [
        *("-n", "2", "--dist", "loadfile"),
        *(f"--ignore={path}" for path in LEFT_OUT if (root / path).exists()),
    ]
    environment = pytest_environment(root, folder / "compiled") | {
        "MUTANTS_COVERAGE_CONFIG": str(config_file),
        "MUTANTS_TESTS": str(tests),
    }
    code = subprocess.run(
        [*PYTEST, *arguments], cwd=root, env=environment, stdin=subprocess.DEVNULL, check=False
    ).returncode
    _store(root, folder, raw, tests)
    return code


PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants_plugin")


def pytest_environment(root: Path, compiled: Path) -> dict[str, str]:
    """Variables of a pytest run on a tree: the tree's own packages, one compilation cache."""
    # The tests of this tool may themselves be run by it.
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("MUTANTS_")}
    return inherited | {
        "PYTHONPATH": f"{root}{os.pathsep}{STARTUP_FOLDER}",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def _store(root: Path, folder: Path, raw: Path, tests: Path) -> None:
    combined = coverage.CoverageData(str(folder / "coverage.sqlite"))
    for file in sorted(raw.glob("data.*")):
        part = coverage.CoverageData(str(file))
        part.read()
        combined.update(part)
        part.close()
    found: dict[str, tuple[float, bool, list[str]]] = {}
    fixture_seconds: dict[str, float] = {}
    for file in sorted(tests.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            test = json.loads(line)
            found[test["test"]] = (test["seconds"], test["is_usable"], test["fixtures"])
            for fixture, seconds in test["fixture_seconds"].items():
                fixture_seconds[fixture] = max(seconds, fixture_seconds.get(fixture, 0.0))
    stored = {"root": str(root), "tests": found, "fixture_seconds": fixture_seconds}
    (folder / "tests.json").write_text(json.dumps(stored))
    shutil.rmtree(raw)
    shutil.rmtree(tests)
