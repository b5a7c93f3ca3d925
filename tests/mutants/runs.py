"""Runs the tests of each mutant in private copies of the tree; appends the results to a file."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.mutants.covered_lines import PYTEST, CoveredLines, Test, pytest_environment
from tests.mutants.draw import Mutant, Place, find_mutants

# Tests that take longer come last, also those of the file that mirrors the source.
_QUICK_TEST_S = 1.0
# A test hangs if it takes this much longer than in the coverage run, and at least so long.
_HANG_FACTOR = 10.0
_MIN_HANG_S = 30.0
# A test that is this late when the limit is reached may continue, to find out whether it hangs.
_LATE_FACTOR = 3.0
_LATE_S = 5.0
# Tests are left out once the durations of the tests before them exceed the limit this many times.
_MAX_PLANNED_OF_LIMIT = 1.5
_POLL_S = 0.2
_NO_TESTS_COLLECTED = 5  # pytest's exit code
_ESTIMATE_AFTER = 10
_NOT_COPIED = (".git", ".hypothesis", ".pytest_cache", ".ruff_cache", ".venv*", "build", "dist")
_RUN_VARIABLE = "MUTANTS_RUN"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What happened to one mutant."""

    id: str
    state: str  # killed, survived, gone, or error: pytest could not run its tests
    by: str | None = None  # the test that killed it
    reason: str = ""
    path: str | None = None
    num_tests: int = 0  # tests that execute the line
    num_run: int = 0  # started, in order
    seconds: float = 0.0
    was_cut_short: bool = False  # survived, with tests left that had no time


def run_mutants(
    root: Path,
    folder: Path,
    mutants: Sequence[Mutant],
    results_file: Path,
    *,
    num_workers: int,
    limit_s: float,
    nice: int = 0,
    has_more_time: bool = False,
) -> None:
    """Runs the mutants that the results file does not hold yet, and those with an error.

    Args:
        folder: Of the coverage run on this tree.
        nice: How much lower the priority of the tests is than that of this process.
        has_more_time: Also runs those again that survived because a limit cut their tests short.
    """
    done = {
        result.id
        for result in read_results(results_file)
        if result.state != "error" and not (has_more_time and result.was_cut_short)
    }
    todo = collections.deque(mutant for mutant in mutants if mutant.id not in done)
    places = find_mutants(root, todo)
    covered = CoveredLines(folder)
    checked = CheckedTests()
    num_done, num_todo, started_s = 0, len(todo), time.monotonic()
    with contextlib.ExitStack() as stack:
        idle: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
        for _ in range(num_workers):
            idle.put(stack.enter_context(TreeCopy(root, folder / "compiled", nice)))

        def run(mutant: Mutant) -> Result:
            copy = idle.get()
            try:
                return run_mutant(copy, mutant, places[mutant.id], covered, checked, limit_s)
            finally:
                idle.put(copy)

        pool = concurrent.futures.ThreadPoolExecutor(num_workers)
        # If this is interrupted, only the mutants in hand are finished.
        stack.callback(pool.shutdown, cancel_futures=True)
        for future in concurrent.futures.as_completed([pool.submit(run, m) for m in todo]):
            result = future.result()
            with results_file.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            num_done += 1
            took_s = time.monotonic() - started_s
            print(
                f"{num_done}/{num_todo} {result.id}: {result.state} {result.by or ''}", flush=True
            )
            if num_done == _ESTIMATE_AFTER:
                minutes = took_s / num_done * num_todo / 60
                print(f"estimate for all {num_todo}: {minutes:.0f} minutes", flush=True)


def read_results(file: Path) -> list[Result]:
    """The last result of each mutant."""
    if not file.exists():
        return []
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
    return list({result.id: result for result in results}.values())


class CheckedTests:
    """Whether tests that killed a mutant pass on the unchanged tree; shared by the workers.

    A test that passes in the coverage run may fail alone, in a copy of the tree, or with compiled
    programs at hand. Such a test cannot kill.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[str, str], bool] = {}

    def unreliable(self) -> set[str]:
        return {test for (test, _), passes in list(self._passes.items()) if not passes}

    def passes(self, copy: "TreeCopy", test: str, place: Place, covered: CoveredLines) -> bool:
        if (test, place.path) not in self._passes:
            # Change the file harmlessly: after any change, JAX may compile programs again.
            source = f"{place.source}# Not a mutant.\n"
            with copy.changed(place.path, source, place.source):
                outcome = copy.run_tests([test], covered.tests, limit_s=float("inf"))
            self._passes[test, place.path] = outcome.exit_code == 0
        return self._passes[test, place.path]


def run_mutant(
    copy: "TreeCopy",
    mutant: Mutant,
    place: Place | None,
    covered: CoveredLines,
    checked: CheckedTests,
    limit_s: float,
) -> Result:
    if place is None:
        return Result(id=mutant.id, state="gone")
    started_s = time.monotonic()
    tests = covered.tests_of_lines(place.path, place.site.lines)

    def result(state: str, **fields: object) -> Result:
        seconds = round(time.monotonic() - started_s, 1)
        return Result(
            id=mutant.id,
            state=state,
            path=f"{place.path}:{place.site.lines[0]}",
            num_tests=len(tests),
            seconds=seconds,
            **fields,
        )

    passed_again: set[str] = set()
    while True:
        usable = tests - checked.unreliable() - passed_again
        if not usable:
            return result("survived", reason="no test executes the line")
        ordered = order_tests(usable, covered.tests, place.path, _MAX_PLANNED_OF_LIMIT * limit_s)
        with copy.changed(place.path, place.site.mutate(place.source), place.source):
            outcome = copy.run_tests(ordered, covered.tests, limit_s)
            if _may_be_chance(outcome, covered.tests):
                again = copy.run_tests([outcome.blamed_test], covered.tests, float("inf"))
                if again.exit_code == 0:
                    passed_again.add(outcome.blamed_test)
                    continue
        by, num_run = outcome.blamed_test, len(outcome.started)
        if outcome.is_timeout and not outcome.is_hang:
            reason = f"limit of {limit_s:g} s"
            return result("survived", reason=reason, num_run=num_run, was_cut_short=True)
        if outcome.exit_code == 0:
            is_short = len(ordered) < len(usable)
            reason = "tests beyond the limit left out" if is_short else ""
            return result("survived", reason=reason, num_run=num_run, was_cut_short=is_short)
        if outcome.exit_code == _NO_TESTS_COLLECTED:
            return result("error", reason=outcome.output[-2000:])
        # Without a test: a file of the tests, or pytest's start, imports what fails now.
        test = by if by in covered.tests else ordered[0]
        if not checked.passes(copy, test, place, covered):
            continue
        by = by or "start of pytest"
        return result("killed", by=by, reason="hang" if outcome.is_hang else "", num_run=num_run)


def _may_be_chance(outcome: "Outcome", durations: Mapping[str, Test]) -> bool:
    """Slow tests start processes and wait for them, so they sometimes fail on a busy machine."""
    has_failed = outcome.exit_code != 0 and (outcome.is_hang or not outcome.is_timeout)
    test = durations.get(outcome.blamed_test)
    return has_failed and test is not None and test.seconds_alone > _QUICK_TEST_S


def order_tests(
    tests: Iterable[str], durations: Mapping[str, Test], source: str, max_total_s: float
) -> list[str]:
    """Sorts tests: those of the source's package first, then quick ones, its own file, cheap files.

    Tests of other packages may seem quick because they load programs that earlier tests compiled,
    and are slow if the mutant changes these programs. Tests of a file stay together, so that its
    fixtures are made once.

    Args:
        max_total_s: Further tests are left out once the stored durations add up to this.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for test in tests:
        is_slow = durations[test].seconds_alone > _QUICK_TEST_S
        groups.setdefault((is_slow, test.split("::")[0]), []).append(test)
    mirror = f"test_{Path(source).name}"
    package = f"tests/{Path(source).parent}/"

    def rank(key: tuple[bool, str]) -> tuple[bool, bool, bool, float, str]:
        is_slow, file = key
        total_s = sum(durations[test].seconds for test in groups[key])
        total_s += max(durations[test].set_up_seconds for test in groups[key])
        return not file.startswith(package), is_slow, Path(file).name != mirror, total_s, file

    ordered, total_s = [], 0.0
    for key in sorted(groups, key=rank):
        for test in sorted(groups[key], key=lambda name: (durations[name].seconds, name)):
            if ordered and total_s > max_total_s:
                return ordered
            ordered.append(test)
            total_s += durations[test].seconds
    return ordered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one pytest process ended."""

    exit_code: int | None  # None: it was ended at the limit or because a test hangs
    started: Sequence[str]
    failed_test: str | None
    is_hang: bool
    output: str

    @property
    def is_timeout(self) -> bool:
        return self.exit_code is None

    @property
    def blamed_test(self) -> str | None:
        """If pytest did not end well: the test that failed, or the one that it was running."""
        return self.failed_test or (self.started[-1] if self.started else None)


class TreeCopy:
    """A private copy of the tree, in which one mutant at a time is run."""

    def __init__(self, root: Path, compiled: Path, nice: int = 0) -> None:
        # Short: the sockets of tests lie in folders of it.
        self._folder = Path(tempfile.mkdtemp(prefix="mut-"))
        self.root = self._folder / "tree"
        self._nice = nice
        shutil.copytree(root, self.root, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        self._compiled = self._folder / "compiled"
        if compiled.exists():
            shutil.copytree(compiled, self._compiled)
        else:
            self._compiled.mkdir()

    def __enter__(self) -> "TreeCopy":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def changed(self, path: str, source: str, original: str) -> Iterator[None]:
        self._replace(self.root / path, source)
        try:
            yield
        finally:
            self._replace(self.root / path, original)

    def _replace(self, file: Path, source: str) -> None:
        file.write_text(source)
        # Compiled files are told apart by seconds and size, which may both be equal.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def run_tests(
        self, tests: Sequence[str], durations: Mapping[str, Test], limit_s: float
    ) -> Outcome:
        """Runs tests in their order until one fails, hangs, or the time is over."""
        run_folder = self._folder / "run"
        temporary, compiled = run_folder / "t", run_folder / "compiled"
        temporary.mkdir(parents=True)
        # What a process writes while it is killed may be broken; so every run gets its own.
        shutil.copytree(self._compiled, compiled, copy_function=os.link)
        progress, output = run_folder / "progress.jsonl", run_folder / "output"
        selection, arguments = run_folder / "selection.json", run_folder / "arguments"
        progress.touch()
        selection.write_text(json.dumps(list(tests)))
        # The plugin selects the tests: collecting single ids by the thousand is slow.
        arguments.write_text("\n".join(dict.fromkeys(test.split("::")[0] for test in tests)))
        run_id = uuid.uuid4().hex
        environment = pytest_environment(self.root, compiled) | {
            "TMPDIR": str(temporary),
            "MUTANTS_SELECTION": str(selection),
            "MUTANTS_PROGRESS": str(progress),
            _RUN_VARIABLE: run_id,
        }
        command = [*PYTEST, "-x", f"--basetemp={temporary / 'b'}", f"@{arguments}"]
        if importlib.util.find_spec("xdist"):
            command += ["-n", "0"]
        try:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    ["nice", "-n", str(self._nice), *command],
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                exit_code, is_hang = _wait(process, progress, durations, limit_s)
            finally:
                _end_processes(run_id)
                process.wait()
            events = _events(progress)
            return Outcome(
                exit_code=exit_code,
                started=[event["test"] for event in events if event["event"] == "started"],
                failed_test=next((e["test"] for e in events if e["event"] == "failed"), None),
                is_hang=is_hang,
                output=output.read_text(errors="replace"),
            )
        finally:
            shutil.rmtree(run_folder, ignore_errors=True)


def _wait(
    process: subprocess.Popen[bytes],
    progress: Path,
    durations: Mapping[str, Test],
    limit_s: float,
) -> tuple[int | None, bool]:
    """Exit code (None at a limit), and whether a test hangs."""
    end_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S), False
        now_s, takes_s, usual_s = time.monotonic(), 0.0, 0.0
        if events := _events(progress):
            event, test = events[-1]["event"], durations.get(events[-1]["test"])
            if test is not None:
                takes_s = now_s - events[-1]["at_s"]
                usual_s = test.seconds_alone if event == "started" else test.seconds
        if takes_s > max(_HANG_FACTOR * usual_s, _MIN_HANG_S):
            return None, True
        is_late = takes_s > _LATE_FACTOR * usual_s + _LATE_S
        if now_s > end_s and not is_late:
            return None, False


def _events(progress: Path) -> list[dict]:
    text = progress.read_text()
    # The last line may be written only in part.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _end_processes(run_id: str) -> None:
    """Ends what is left of a run: servers of a test have sessions of their own."""
    marker = f"{_RUN_VARIABLE}={run_id}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        # It may end by itself, or be another user's.
        with contextlib.suppress(OSError):
            if marker in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
