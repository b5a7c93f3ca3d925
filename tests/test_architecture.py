"""The rules of paxkv/STYLE.md and paxkv/ARCHITECTURE.md that a program can check."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paxkv", "pallas_kernels", "models", "benchmarks")
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOP_LEVEL_NAMES = {
    "LICENSE",
    "pyproject.toml",
    "paxkv",
    "pallas_kernels",
    "models",
    "tests",
    "benchmarks",
    "README.md",
    "docs",
}

# Composition roots build the objects of the other layers, so they may import everything of ours.
COMPOSITION_ROOTS = {
    "paxkv/entrypoints/build.py",
    "paxkv/entrypoints/build_client.py",
    "paxkv/entrypoints/build_drafter.py",
    "paxkv/entrypoints/build_model.py",
    "paxkv/entrypoints/build_runner.py",
    "paxkv/entrypoints/build_scheduler.py",
    "paxkv/entrypoints/trace_frames.py",
    "paxkv/entrypoints/engine_process.py",
    "paxkv/serve.py",
    "paxkv/asgi.py",
    "paxkv/ray/engine_replica.py",
    "paxkv/compile.py",
    "paxkv/llm.py",
    "paxkv/generate.py",
    "paxkv/replay.py",
    "paxkv/entrypoints/cli/generate.py",
    "paxkv/entrypoints/cli/run_batch.py",
    "paxkv/entrypoints/cli/collect_env.py",
    # Names LLM and CompiledGenerator for type checkers; at run time they come late (see the file).
    "paxkv/__init__.py",
}
PAXKV_TOP = {
    "paxkv",
    "paxkv.errors",
    "paxkv.package_origin",
}
# Names of `paxkv` that stand for composition roots: only those above may take them.
ROOT_NAMES = {"paxkv.LLM", "paxkv.CompiledGenerator"}
# Layer -> what it may import of ours besides itself; "paxkv" stands for the files of PAXKV_TOP.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "models": {"pallas_kernels"},
    "paxkv": set(),
    "paxkv.config": {"paxkv"},
    "paxkv.contracts": {"paxkv", "paxkv.config"},
    "paxkv.entrypoints": {"paxkv", "paxkv.config"},
    "paxkv.text": {"paxkv", "paxkv.config"},
    "paxkv.kv_cache": {"paxkv", "paxkv.config", "paxkv.contracts"},
    "paxkv.scheduler": {"paxkv", "paxkv.config", "paxkv.contracts", "paxkv.kv_cache"},
    "paxkv.runner": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "models",
        "pallas_kernels",
    },
    "paxkv.trace": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.kv_cache",
        "paxkv.scheduler",
    },
    "paxkv.structured_output": {"paxkv", "paxkv.config", "paxkv.contracts"},
    "paxkv.inspector": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.kv_cache",
        "paxkv.scheduler",
        "paxkv.trace",
    },
    "paxkv.engine": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.structured_output",
        "paxkv.inspector",
    },
    "paxkv.fleet": {"paxkv", "paxkv.config", "paxkv.contracts"},
    "paxkv.client": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.text",
        "paxkv.fleet",
    },
    "paxkv.server": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.text",
        "paxkv.client",
        "paxkv.inspector",
        "paxkv.fleet",
    },
    "paxkv.ray": {
        "paxkv",
        "paxkv.config",
        "paxkv.contracts",
        "paxkv.fleet",
        "paxkv.server",
        "paxkv.entrypoints",
    },
}
# The folders of the runner, from the ground floor up: each imports only those before it.
RUNNER_FLOORS = (
    "ranks",
    "shapes",
    "memory",
    "sampling",
    "drafters",
    "features",
    "batch",
    "programs",
)
MAY_IMPORT_JAX = {"pallas_kernels", "models", "paxkv.runner"}
JAX_MODULES = {"jax", "jaxlib", "flax", "optax"}
ORACLE_MODULES = {"torch", "transformers"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer that a module of ours belongs to; None for modules that are not ours."""
    parts = module.split(".")
    if parts[0] == "paxkv" and len(parts) > 1 and ".".join(parts[:2]) in MAY_IMPORT:
        return ".".join(parts[:2])
    return parts[0] if parts[0] in (*MAY_IMPORT, "benchmarks") else None


def statements(block: ast.AST) -> Iterator[ast.stmt]:
    """All statements in the block. Expressions, most of a file's nodes, are not visited."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Every imported module with its line, also inside functions and under TYPE_CHECKING."""
    found = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "." * node.level + (node.module or "")))
            # `from paxkv import build` imports the module paxkv.build.
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def is_module_of_ours(module: str) -> bool:
    path = ROOT / Path(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def import_violations(path: Path) -> list[str]:
    layer, name = layer_of(module_name(path)), relative(path)
    if name in COMPOSITION_ROOTS or layer == "benchmarks":
        return []
    bad = []
    for line, module in imported_modules(path):
        where = f"{name}:{line} imports {module}"
        top = module.split(".")[0]
        if module.startswith("."):
            bad.append(f"{where}: absolute imports only")
        elif top in JAX_MODULES and layer not in MAY_IMPORT_JAX:
            bad.append(f"{where}: {layer} must not import JAX")
        elif top in ORACLE_MODULES:
            bad.append(f"{where}: torch and transformers belong to benchmarks and tests")
        elif top == "tests" or module in ROOT_NAMES:
            bad.append(f"{where}: that lies above {layer}")
        elif layer == "paxkv" and top == "paxkv" and is_module_of_ours(module):
            if module not in PAXKV_TOP:
                bad.append(f"{where}: top files may import {sorted(PAXKV_TOP)}")
        elif (target := layer_of(module)) and is_module_of_ours(module) and target != layer:
            is_top_file = target != "paxkv" or module in PAXKV_TOP
            if target not in MAY_IMPORT[layer] or not is_top_file:
                bad.append(f"{where}: {layer} may import {sorted(MAY_IMPORT[layer])} of ours")
    return bad


def test_imports_point_down() -> None:
    assert [violation for path in SOURCES for violation in import_violations(path)] == []


def floor_violations(path: Path) -> list[str]:
    """Imports of a file in a folder of the runner that lead to a higher floor."""
    floor = module_name(path).split(".")[2]
    below = RUNNER_FLOORS[: RUNNER_FLOORS.index(floor) + 1]
    return [
        f"{relative(path)}:{line} imports {module}: {floor} may import {below} of the runner"
        for line, module in imported_modules(path)
        if module.startswith("paxkv.runner.") and module.split(".")[2] not in below
    ]


def test_folders_of_the_runner_are_floors() -> None:
    folders = {path.parent.name for path in (ROOT / "paxkv" / "runner").glob("*/*.py")}
    assert folders == set(RUNNER_FLOORS)
    files = [path for floor in folders for path in (ROOT / "paxkv/runner" / floor).glob("*.py")]
    assert [violation for path in files for violation in floor_violations(path)] == []


def test_the_rule_of_floors_finds_a_planted_violation(tmp_path: Path, monkeypatch) -> None:
    planted = tmp_path / "paxkv" / "runner" / "memory" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(
        "from paxkv.runner.shapes import step_buckets\n"
        "def f():\n    from paxkv.runner.batch.input_batch import InputBatch\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    found = floor_violations(planted)
    assert found and all(":3 imports paxkv.runner.batch" in violation for violation in found)


SCHEDULERS = {"Scheduler", "AsyncScheduler", "TraceRecorder"}


def scheduler_violations(path: Path) -> list[str]:
    """Lines that build a scheduler, or ask which class of scheduler they have."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        # `make_recorder` wraps the scheduler that a factory built.
        if called in SCHEDULERS - {"TraceRecorder"}:
            found.append(f"{path.name}:{node.lineno} builds a {called}")
        if called == "isinstance" and SCHEDULERS & set(re.findall(r"\w+", ast.unparse(node))):
            found.append(f"{path.name}:{node.lineno} asks for a class of scheduler")
    return found


def test_users_of_a_scheduler_neither_build_it_nor_ask_for_its_class() -> None:
    users = [
        path
        for package in ("engine", "inspector", "trace", "entrypoints")
        for path in (ROOT / "paxkv" / package).rglob("*.py")
        if path.name != "build_scheduler.py"
    ]
    assert len(users) > 30
    assert [violation for path in users for violation in scheduler_violations(path)] == []


def test_the_scheduler_rule_finds_planted_violations(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("if isinstance(s, (int, TraceRecorder)):\n    s = AsyncScheduler(x=1)\n")
    assert scheduler_violations(planted) == [
        "planted.py:1 asks for a class of scheduler",
        "planted.py:2 builds a AsyncScheduler",
    ]


# Comments, then the docstring. It is quicker than to parse all files.
DOCSTRING = re.compile(r'(#.*\n)*"""[^"\s]')


def test_every_file_says_what_it_is_for() -> None:
    assert not DOCSTRING.match('import ast\n"""No docstring."""\n')
    silent = [p for p in SOURCES + TESTS if not DOCSTRING.match(p.read_text())]
    assert [relative(p) for p in silent] == [], "a one-line docstring says what the file is for"


def mirror_violation(test_file: Path) -> str | None:
    """What is wrong where a test file does not import the module that it mirrors."""
    inside = test_file.relative_to(ROOT / "tests")
    if inside.parts[0] not in PACKAGES:
        return None
    mirrored = ROOT / inside.parent / inside.name.removeprefix("test_")
    if not mirrored.is_file() and not mirrored.with_suffix("").is_dir():
        return f"{relative(test_file)} mirrors {relative(mirrored)}, which does not exist"
    wanted = module_name(mirrored)
    # Most files import the module at the top. A search finds that faster than the parser.
    if re.search(rf"^from {re.escape(wanted)}(\.\w+)* import ", test_file.read_text(), re.M):
        return None
    modules = [module for _, module in imported_modules(test_file)]
    if any(m == wanted or m.startswith(f"{wanted}.") for m in modules):
        return None
    return f"{relative(test_file)} must import {wanted}"


# What asks which processor a program runs on: names that tell it, and comparisons with them.
_KIND = r'"(cpu|gpu|tpu|cuda)"'
ASKS_PLATFORM = re.compile(rf"default_backend\(|instruction_sets\(|[=!]= ?{_KIND}|{_KIND} ?[=!]=")
# Platforms own what depends on the processor; ops choose their bodies in the other two.
MAY_ASK_PLATFORM = ("models/platforms/", "pallas_kernels/target.py", "pallas_kernels/dispatch.py")


def test_only_platforms_and_dispatch_ask_for_the_processor() -> None:
    assert ASKS_PLATFORM.search('if device.platform == "cpu":')
    violations = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if not relative(path).startswith((*MAY_ASK_PLATFORM, "benchmarks/", "models/demo/"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKS_PLATFORM.search(line)
    ]
    assert violations == []


def test_layers_read_and_write_states_on_each_device() -> None:
    """Outside of `by_device`, a format would see the pages of all devices as one page."""
    found = [
        relative(path)
        for path in SOURCES
        if relative(path).startswith("models/")
        if re.search(r"format\.(read|write)\b", path.read_text())
    ]
    assert found == ["models/forward/layer_context.py"]


def test_test_files_import_what_they_mirror() -> None:
    violations = [mirror_violation(p) for p in TESTS if p.name.startswith("test_")]
    assert [v for v in violations if v is not None] == []


WAITS_FOR_PROCESS = {"subprocess.run", "subprocess.check_output", "subprocess.check_call"}
# The tool for mutants limits whole runs; the test of the time limit starts what has none.
MAY_WAIT_LONG = ("tests/mutants/", "tests/test_time_limit.py")


# Calls without a time limit. They are allowed if the line before kills the process.
WAITS_FOR_EVER = re.compile(r"process\.(wait|communicate)\(\)")
# Reads without a time limit. They are allowed in a block of `killed_after`, and if the line before
# waits for the end of the process.
READS_FOR_EVER = re.compile(r"\.std(out|err)\.read(line)?\(\)|\bin \w*process\.std(out|err)\b")


def unlimited_waits(path: Path) -> list[str]:
    """Calls in a file that wait for a process, or read its output, without a limit."""
    text = path.read_text()
    lines = text.splitlines()
    pairs = list(enumerate(itertools.pairwise(["", *lines]), start=1))
    found = [
        number
        for number, (before, line) in pairs
        if WAITS_FOR_EVER.search(line) and "kill" not in before
    ]
    reads = [
        number
        for number, (before, line) in pairs
        if READS_FOR_EVER.search(line) and ".wait(" not in before
    ]
    calls = reads or any(name in text for name in WAITS_FOR_PROCESS)
    nodes = list(ast.walk(ast.parse(text))) if calls else []
    limited = {
        number
        for node in nodes
        if isinstance(node, ast.With) and "killed_after" in ast.unparse(node.items[0])
        for number in range(node.lineno, node.end_lineno + 1)
    }
    found += [number for number in reads if number not in limited]
    found += [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in WAITS_FOR_PROCESS
        and "timeout" not in {keyword.arg for keyword in node.keywords}
    ]
    return [f"{path.name}:{number} waits for a process without a timeout" for number in found]


def test_tests_wait_for_processes_with_a_timeout(tmp_path: Path) -> None:
    paths = [p for p in TESTS if not relative(p).startswith(MAY_WAIT_LONG)]
    assert [wait for path in paths for wait in unlimited_waits(path)] == []
    planted = tmp_path / "planted.py"
    planted.write_text(
        "subprocess.run(['a'], timeout=1)\nsubprocess.run(['b'])\n"
        "{0}.wait(1)\n{0}.kill()\n{0}.wait()\n{0}.communicate()\n"
        "with killed_after(1, {0}):\n    {0}.{1}()\n{0}.{1}()\n".format(
            "process", "stdout.readline"
        )
    )
    assert unlimited_waits(planted) == [
        f"planted.py:{number} waits for a process without a timeout" for number in (6, 9, 2)
    ]


def test_no_init_files_under_tests() -> None:
    assert [relative(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_top_level_names_are_the_agreed_ones() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {n for n in names if not n.startswith(".")} <= TOP_LEVEL_NAMES


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "paxkv" / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w/]+\.py)", text)
    assert len(named) > 20
    roots = (ROOT / "paxkv", ROOT / "tests" / "paxkv", ROOT / "tests", ROOT)
    # A bare name is one of the few files that are talked about around it.
    bare = {path.name for path in SOURCES + TESTS}
    missing = [n for n in named if n not in bare and not any((r / n).is_file() for r in roots)]
    assert missing == []


def test_the_import_rule_finds_a_planted_violation(tmp_path: Path, monkeypatch) -> None:
    """The checker itself is checked: a late import of JAX by the host half is seen."""
    planted = tmp_path / "paxkv" / "scheduler" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("def f():\n    import jax\n    from paxkv.runner import step\n")
    (tmp_path / "paxkv" / "runner").mkdir()
    (tmp_path / "paxkv" / "runner" / "step.py").write_text("")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    violations = import_violations(planted)
    assert len([v for v in violations if "must not import JAX" in v]) == 1
    assert any("paxkv.runner" in v for v in violations)


def test_the_import_rule_finds_a_planted_composition_root(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "paxkv").mkdir()
    (tmp_path / "paxkv" / "build.py").write_text("")
    planted = tmp_path / "paxkv" / "config.py"
    planted.write_text("from paxkv import LLM, build\nimport tests.conftest\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    violations = "\n".join(import_violations(planted))
    for module in ("paxkv.LLM", "paxkv.build", "tests.conftest"):
        assert f"imports {module}:" in violations
