"""The pytest plugin of the runs that `tests.mutants` starts (`-p mutants_plugin`).

In a coverage run it names the test that executes each line, and writes one JSON line per test into
a file of the folder MUTANTS_TESTS. Lines of a fixture of a wider scope than one test are recorded
under the fixture, since they serve every test that uses it.

In the run of a mutant it keeps only the tests that the file MUTANTS_SELECTION lists, in its order.
It appends start, end of the set-up and failure of each test to the file MUTANTS_PROGRESS.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import Phase, settings

FIXTURE_CONTEXT = "fixture:"


def pytest_configure(config: pytest.Config) -> None:
    # The same examples in each run, no failure because the machine is busy, and no time spent on
    # making a failing example smaller.
    settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    settings.load_profile("mutants")
    if "MUTANTS_TESTS" in os.environ:
        config.pluginmanager.register(CoverageOfTests(Path(os.environ["MUTANTS_TESTS"])))
    if "MUTANTS_SELECTION" in os.environ:
        tests = json.loads(Path(os.environ["MUTANTS_SELECTION"]).read_text())
        config.pluginmanager.register(Selection(tests, Path(os.environ["MUTANTS_PROGRESS"])))


class CoverageOfTests:
    """Switches coverage.py's context; writes duration, result and shared fixtures of each test."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.jsonl"
        self._context = ""
        self._path = ""
        self._has_failed = False
        self._was_skipped = False
        self._shared_fixtures: set[str] = set()
        # Set-up of shared fixtures in this test; it is no part of the test's own time.
        self._fixture_seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        path = item.nodeid.split("::")[0]
        if path != self._path and "jax" in sys.modules:
            # Otherwise only the first file of a worker would execute lines that JAX traces once.
            sys.modules["jax"].clear_caches()
        self._path = path
        self._has_failed = self._was_skipped = False
        self._fixture_seconds = {}
        self._switch(item.nodeid)
        started_s = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - started_s
            self._switch("")
            names = set(getattr(item, "fixturenames", ()))
            shared = sorted(
                context
                for context in self._shared_fixtures
                if _fixture_name(context) in names and item.nodeid.startswith(_folder_of(context))
            )
            test = {
                "test": item.nodeid,
                "seconds": round(seconds - sum(self._fixture_seconds.values()), 4),
                "is_usable": not (self._has_failed or self._was_skipped),
                "fixtures": shared,
                "fixture_seconds": self._fixture_seconds,
            }
            with self._file.open("a") as file:
                file.write(json.dumps(test) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed
        self._was_skipped |= report.skipped

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef):
        if fixturedef.scope == "function":
            return (yield)
        context = f"{FIXTURE_CONTEXT}{fixturedef.baseid}::{fixturedef.argname}"
        self._shared_fixtures.add(context)
        around, started_s = self._context, time.perf_counter()
        self._switch(context)
        try:
            return (yield)
        finally:
            self._switch(around)
            self._fixture_seconds[context] = time.perf_counter() - started_s

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        # A worker of pytest-xdist may be ended before Python would save.
        self._coverage().save()

    def _switch(self, context: str) -> None:
        self._context = context
        self._coverage().switch_context(context)
        # For the processes that the test starts.
        os.environ["MUTANTS_CONTEXT"] = context

    def _coverage(self):
        from coverage import Coverage

        return Coverage.current()


def _fixture_name(context: str) -> str:
    return context.rpartition("::")[2]


def _folder_of(context: str) -> str:
    return context.removeprefix(FIXTURE_CONTEXT).rpartition("::")[0]


class Selection:
    """Runs the listed tests in their order; says which one runs and which one failed."""

    def __init__(self, tests: list[str], progress: Path) -> None:
        self._position = {test: position for position, test in enumerate(tests)}
        self._progress = progress

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]):
        chosen = [item for item in items if item.nodeid in self._position]
        config.hook.pytest_deselected(
            items=[item for item in items if item.nodeid not in self._position]
        )
        items[:] = sorted(chosen, key=lambda item: self._position[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)
        elif report.when == "setup":
            self._write("set up", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def _write(self, event: str, nodeid: str) -> None:
        line = json.dumps({"event": event, "test": nodeid, "at_s": time.monotonic()})
        with self._progress.open("a") as file:
            file.write(line + "\n")
