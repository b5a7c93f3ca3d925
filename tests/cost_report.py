"""Pytest plugin: prints CPU seconds and compiled programs per test file and of the costliest tests.

    python -m pytest -p tests.cost_report tests/models

CPU seconds are user and system time of the test process and of its children. A child's time counts
when the child is waited for, so a server's time belongs to the test that stops it. A file's share
includes importing the module and the fixtures that its tests are the first to use.

Programs are those compiled in the test process. A program loaded from the compilation cache counts
as loaded, not as compiled. Programs of child processes are not counted.
"""

import collections
import dataclasses
import os
import sys

import pytest

PROPERTY = "test_cost"
# Single tests in the second table.
NUM_TESTS = 100


@dataclasses.dataclass(slots=True)
class Cost:
    """What a stretch of a test run cost."""

    cpu_s: float = 0.0
    compiled: int = 0
    loaded: int = 0

    def __add__(self, other):
        return Cost(
            self.cpu_s + other.cpu_s, self.compiled + other.compiled, self.loaded + other.loaded
        )

    def __sub__(self, other):
        return Cost(
            self.cpu_s - other.cpu_s, self.compiled - other.compiled, self.loaded - other.loaded
        )


class Meter:
    """Reads the costs of this process so far."""

    def __init__(self):
        self._programs = 0
        self._loaded = 0
        self._listens = False

    def read(self) -> Cost:
        self._listen_to_jax()
        times = os.times()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        return Cost(cpu_s, self._programs - self._loaded, self._loaded)

    def _listen_to_jax(self):
        # Tests of the host half do not load JAX, and this plugin must not load it for them.
        monitoring = sys.modules.get("jax.monitoring")
        if self._listens or monitoring is None:
            return
        monitoring.register_event_duration_secs_listener(self._count_program)
        monitoring.register_event_listener(self._count_loaded)
        self._listens = True

    def _count_program(self, event, duration_s, **_):
        # JAX records this event for a program that it loads from the cache, too.
        self._programs += event == "/jax/core/compile/backend_compile_duration"

    def _count_loaded(self, event, **_):
        self._loaded += event == "/jax/compilation_cache/cache_hits"


class CostReport:
    """Measures in the process that runs the tests; prints in the one that writes the summary."""

    def __init__(self):
        self._meter = Meter()
        self._last_reading = self._meter.read()
        self._of_collection = collections.defaultdict(Cost)
        self._of_file = collections.defaultdict(Cost)
        self._of_test = collections.defaultdict(Cost)
        self._num_tests = collections.Counter()

    def _cost_since_last_reading(self) -> Cost:
        reading = self._meter.read()
        cost = reading - self._last_reading
        self._last_reading = reading
        return cost

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        self._of_collection[collector.nodeid.split("::")[0]] += self._cost_since_last_reading()
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        cost = self._cost_since_last_reading()
        cost += self._of_collection.pop(item.nodeid.split("::")[0], Cost())
        # pytest-xdist sends user properties from its workers to the process that prints.
        report.user_properties.append((PROPERTY, dataclasses.astuple(cost)))
        return report

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.split("::")[0]
        self._num_tests[file] += report.when == "setup"
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._of_file[file] += Cost(*value)
                self._of_test[report.nodeid] += Cost(*value)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("cost per test file")
        terminalreporter.line("  CPU s  compiled  loaded  tests  file")
        costs = sorted(self._of_file.items(), key=lambda item: -item[1].cpu_s)
        total = sum(self._of_file.values(), Cost())
        for file, cost in [*costs, ("all files", total)]:
            num_tests = self._num_tests[file] or self._num_tests.total()
            terminalreporter.line(
                f"{cost.cpu_s:7.1f}  {cost.compiled:8}  {cost.loaded:6}  {num_tests:5}  {file}"
            )
        terminalreporter.section(f"costliest {NUM_TESTS} tests")
        terminalreporter.line("  CPU s  compiled  loaded  test")
        tests = sorted(self._of_test.items(), key=lambda item: -item[1].cpu_s)
        for test, cost in tests[:NUM_TESTS]:
            terminalreporter.line(f"{cost.cpu_s:7.1f}  {cost.compiled:8}  {cost.loaded:6}  {test}")


def pytest_configure(config):
    config.pluginmanager.register(CostReport())
