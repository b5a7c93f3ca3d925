"""The tool that mutates the code: names, the draw, and what it says about planted tests."""

import ast
import dataclasses
from pathlib import Path

import pytest

from tests.mutants import covered_lines, draw, report, runs
from tests.mutants.sites import find_sites

POOL = '''\
"""A pool."""


class Pool:
    def __init__(self, num_blocks):
        self.num_free = num_blocks

    def allocate(self, count):
        if count > self.num_free:
            return False
        self.num_free -= count
        return True

    def free_all(self):
        total = 0
        while self.num_free > 0:
            self.num_free -= 1
            total += 1
        return total

    def describe(self):
        return 7

    def never_called(self):
        return 5
'''
TESTS = """\
import os
import subprocess
import sys

import pytest

from paxkv.kv_cache.pool import Pool


@pytest.fixture(scope="module")
def used_pool():
    pool = Pool(4)
    assert pool.allocate(3)
    return pool


def test_allocation_that_does_not_fit(used_pool):
    assert not used_pool.allocate(3)


def test_all_are_freed(used_pool):
    assert used_pool.free_all() == 1


def test_other_process():
    code = "from paxkv.kv_cache.pool import Pool; print(Pool(4).describe())"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"7\\n"


def test_fails_in_every_run_of_mutants():
    pool = Pool(1)
    pool.allocate(2)
    assert "MUTANTS_SELECTION" not in os.environ
"""
EVERY_KIND = """\
def f(a, b, *, is_on=True):
    c = a + 1
    for i in range(a):
        if not (i < b and b == a):
            logger.info("at %d", 3)
            c = a[i:b] * 2
    if a in b:
        raise ValueError(f"{a + 1} is" + "bad")
    return c
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    _write(root / "paxkv/kv_cache/pool.py", POOL)
    _write(root / "tests/test_pool.py", TESTS)
    _write(root / "pytest.ini", "[pytest]\n")
    return root


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _draw(root: Path, seed: int) -> list[draw.Mutant]:
    files = draw.files_of_area(root, "pool and managers")
    return draw.draw(root, {file: set(range(1, 100)) for file in files}, seed, 8)


def _mutant_of(line: str, mutated: str) -> draw.Mutant:
    (name,) = (
        site.name
        for site in find_sites(POOL)
        if (site.name.line, site.name.mutated) == (line, mutated)
    )
    return draw.Mutant(
        id=f"{line} / {mutated}",
        area="pool and managers",
        file="paxkv/kv_cache/pool.py",
        name=name,
    )


def test_every_kind_of_mutation_changes_the_line_that_its_name_shows():
    sites = find_sites(EVERY_KIND)
    changes = {(site.name.kind, site.name.line, site.name.mutated) for site in sites}
    header = "if not (i < b and b == a):"
    assert {
        ("arithmetic", "c = a + 1", "c = a - 1"),
        ("constant", "c = a + 1", "c = a + 2"),
        ("constant", "c = a + 1", "c = a + 0"),
        ("off-by-one", "for i in range(a):", "for i in range(a - 1):"),
        ("boolean", header, "if not (i < b or b == a):"),
        ("boolean", header, "if not not (i < b and b == a):"),
        ("comparison", header, "if not (i >= b and b == a):"),
        ("comparison", header, "if not (i < b and b != a):"),
        ("off-by-one", header, "if not (i <= b and b == a):"),
        ("off-by-one", "c = a[i:b] * 2", "c = a[i:b + 1] * 2"),
        ("deletion", "c = a[i:b] * 2", "pass"),
        ("comparison", "if a in b:", "if a not in b:"),
        ("deletion", "raise ValueError(f'{a + 1} is' + 'bad')", "pass"),
        ("deletion", "return c", "pass"),
    } <= changes
    # Neither the log line nor the message of the error nor the default value.
    assert not [line for _, line, mutated in changes if "logger" in line or "is_on" in line]
    assert {mutated for _, line, mutated in changes if line.startswith("raise")} == {"pass"}
    for site in sites:
        mutated = ast.unparse(ast.parse(site.mutate(EVERY_KIND)))
        assert mutated != ast.unparse(ast.parse(EVERY_KIND))
        assert site.name.mutated in [line.strip() for line in mutated.splitlines()]


def test_same_line_twice_in_a_function_has_two_names():
    source = "def f(a):\n    a += 1\n    a += 1\n"
    sites = [site for site in find_sites(source) if site.name.mutated == "a -= 1"]
    assert [site.name.occurrence for site in sites] == [0, 1]
    assert [site.mutate(source).splitlines().index("    a -= 1") for site in sites] == [1, 2]


def test_seed_decides_what_is_drawn(tree: Path):
    mutants = _draw(tree, 1)
    assert len({mutant.name for mutant in mutants}) == 8
    assert mutants == _draw(tree, 1) != _draw(tree, 2)
    assert [draw.Mutant.from_json(mutant.to_json()) for mutant in mutants] == mutants


def test_lines_that_no_test_executes_are_not_drawn(tree: Path):
    line = POOL.splitlines().index("        return 7") + 1
    mutants = draw.draw(tree, {"paxkv/kv_cache/pool.py": {line}}, 1)
    assert {mutant.name.function for mutant in mutants} == {"Pool.describe"}


def test_mutants_are_found_after_their_function_has_moved(tree: Path):
    mutants = _draw(tree, 1)
    _write(tree / "paxkv/kv_cache/pool/renamed.py", "import ast\n\n\n" + POOL)
    (tree / "paxkv/kv_cache/pool.py").unlink()
    places = draw.find_mutants(tree, mutants)
    for mutant in mutants:
        place = places[mutant.id]
        assert place.path == "paxkv/kv_cache/pool/renamed.py"
        mutated = place.site.mutate(place.source)
        assert mutated.startswith("import ast\n") and mutated != place.source


def test_file_of_the_same_name_is_preferred(tree: Path):
    mutants = _draw(tree, 1)
    _write(tree / "paxkv/another.py", POOL)
    _write(tree / "paxkv/memory/pool.py", POOL)
    (tree / "paxkv/kv_cache/pool.py").unlink()
    places = draw.find_mutants(tree, mutants).values()
    assert {place.path for place in places} == {"paxkv/memory/pool.py"}


@pytest.mark.parametrize(
    ("old", "new"), [("if count > self", "if 0 + count > self"), ("allocate", "allocate_blocks")]
)
def test_changed_line_or_renamed_function_is_gone(tree: Path, old: str, new: str):
    changed = _mutant_of("if count > self.num_free:", "if count >= self.num_free:")
    kept = _mutant_of("return total", "pass")
    _write(tree / "paxkv/kv_cache/pool.py", POOL.replace(old, new))
    places = draw.find_mutants(tree, [changed, kept])
    assert places[changed.id] is None
    assert places[kept.id].site.lines == range(19, 20)


def test_tests_of_the_package_come_first_and_of_these_quick_ones_of_the_mirroring_file():
    near, far = "tests/paxkv/kv_cache", "tests/end_to_end"
    seconds = {
        f"{near}/test_pool.py::slow": 2.0,
        f"{near}/test_pool.py::b": 0.5,
        f"{near}/test_pool.py::a": 0.6,
        f"{near}/test_cheap.py::a": 0.1,
        f"{near}/sub/test_dear.py::a": 0.9,
        f"{far}/test_demo.py::a": 0.1,
        f"{far}/test_demo.py::slow": 2.5,
        f"{far}/test_other.py::slow": 3.0,
    }
    durations = {name: covered_lines.Test(taken, 0.0, True, ()) for name, taken in seconds.items()}
    ordered = runs.order_tests(seconds, durations, "paxkv/kv_cache/pool.py", 5.0)
    assert ordered == [
        f"{near}/test_pool.py::b",
        f"{near}/test_pool.py::a",
        f"{near}/test_cheap.py::a",
        f"{near}/sub/test_dear.py::a",
        f"{near}/test_pool.py::slow",
        f"{far}/test_demo.py::a",
        f"{far}/test_demo.py::slow",
        # The next one would begin after 6.7 seconds.
    ]


@pytest.mark.slow  # pytest -m slow tests/test_mutants.py
def test_killed_and_survived_are_distinguished(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "_MIN_HANG_S", 1.0)
    folder, results = tmp_path / "coverage", tmp_path / "results.jsonl"
    assert covered_lines.measure(tree, folder, draw.TARGET_PACKAGES, ["-p", "no:doctest"]) == 0
    covered = covered_lines.CoveredLines(folder)
    # Line 11 is executed by a fixture, which the first of the two tests made.
    assert covered.tests_of_lines("paxkv/kv_cache/pool.py", [11]) == {
        "tests/test_pool.py::test_allocation_that_does_not_fit",
        "tests/test_pool.py::test_all_are_freed",
    }

    # By a test that executes the line in a process that it starts.
    killed = _mutant_of("return 7", "return 8")
    survivor = _mutant_of("if count > self.num_free:", "if count >= self.num_free:")
    hang = _mutant_of("self.num_free -= 1", "self.num_free += 1")
    not_executed = _mutant_of("return 5", "return 6")
    gone = dataclasses.replace(
        killed, id="gone", name=dataclasses.replace(killed.name, function="Pool.other")
    )
    mutants = [killed, survivor, hang, not_executed, gone]

    def run(some: list[draw.Mutant]) -> dict[str, runs.Result]:
        runs.run_mutants(tree, folder, some, results, num_workers=2, limit_s=60)
        return {result.id: result for result in runs.read_results(results)}

    run(mutants[:-1])
    found = run(mutants)  # goes on with the last
    assert len(results.read_text().splitlines()) == len(mutants)
    assert {mutant.id: found[mutant.id].state for mutant in mutants} == {
        killed.id: "killed",
        # Not killed by the test that fails without a mutant too.
        survivor.id: "survived",
        hang.id: "killed",
        not_executed.id: "survived",
        gone.id: "gone",
    }
    assert found[killed.id].by == "tests/test_pool.py::test_other_process"
    assert (found[hang.id].by, found[hang.id].reason) == (
        "tests/test_pool.py::test_all_are_freed",
        "hang",
    )
    assert found[survivor.id].num_run == 2
    assert (tree / "paxkv/kv_cache/pool.py").read_text() == POOL

    text = report.write_report(mutants, list(found.values()))
    assert "| pool and managers | 2 | 2 | 1 | 0 | 0 |" in text
    assert (
        "`Pool.allocate`, off-by-one: `if count > self.num_free:` → `if count >= self.num_free:`"
        " (2 of 3 tests)" in text
    )
