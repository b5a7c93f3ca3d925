"""The rules of paxkv/STYLE.md and paxkv/ARCHITECTURE.md that a program can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paxkv", "pallas_kernels", "models", "benchmarks")
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOP_LEVEL_NAMES = {
    "pyproject.toml",
    "paxkv",
    "pallas_kernels",
    "models",
    "tests",
    "benchmarks",
    "LICENSE",
    "README.md",
    "docs",
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_KERNEL_FUNCTION_LINES = 150

# Composition roots build the objects of the other layers, so they may import everything of ours.
COMPOSITION_ROOTS = {
    "paxkv/build.py",
    "paxkv/build_client.py",
    "paxkv/engine_process.py",
    "paxkv/serve.py",
    "paxkv/compile.py",
    "paxkv/llm.py",
    "paxkv/generate.py",
    "paxkv/replay.py",
    "paxkv/cli/generate.py",
    "paxkv/cli/collect_env.py",
    # Names LLM and CompiledGenerator for type checkers; at run time they come late (see the file).
    "paxkv/__init__.py",
}
PAXKV_TOP = {
    "paxkv",
    "paxkv.errors",
    "paxkv.generation_config",
    "paxkv.config",
    "paxkv.server_config",
    "paxkv.setting",
    "paxkv.command_end",
    "paxkv.command_line",
    "paxkv.package_origin",
    "paxkv.process_logging",
    "paxkv.sampling_defaults",
    "paxkv.sampling_params",
    "paxkv.structured_outputs_config",
    "paxkv.structured_outputs_params",
}
# Names of `paxkv` that stand for composition roots: only those above may take them.
ROOT_NAMES = {"paxkv.LLM", "paxkv.CompiledGenerator"}
# Layer -> what it may import of ours besides itself; "paxkv" stands for the files of PAXKV_TOP.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "models": {"pallas_kernels"},
    "paxkv": set(),
    "paxkv.contracts": {"paxkv"},
    "paxkv.cli": {"paxkv"},
    "paxkv.text": {"paxkv"},
    "paxkv.kv_cache": {"paxkv", "paxkv.contracts"},
    "paxkv.scheduler": {"paxkv", "paxkv.contracts", "paxkv.kv_cache"},
    "paxkv.runner": {"paxkv", "paxkv.contracts", "models", "pallas_kernels"},
    "paxkv.structured_output": {"paxkv", "paxkv.contracts"},
    "paxkv.inspector": {"paxkv", "paxkv.contracts", "paxkv.kv_cache", "paxkv.scheduler"},
    "paxkv.engine": {
        "paxkv",
        "paxkv.contracts",
        "paxkv.text",
        "paxkv.scheduler",
        "paxkv.runner",
        "paxkv.structured_output",
        "paxkv.inspector",
    },
    "paxkv.client": {"paxkv", "paxkv.contracts", "paxkv.text"},
    "paxkv.server": {"paxkv", "paxkv.contracts", "paxkv.text", "paxkv.client", "paxkv.inspector"},
}
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


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Every imported module with its line, also inside functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
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
    layer = layer_of(module_name(path))
    if relative(path) in COMPOSITION_ROOTS or layer == "benchmarks":
        return []
    bad = []
    for line, module in imported_modules(path):
        where = f"{relative(path)}:{line} imports {module}"
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


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    assert import_violations(path) == []


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
def test_file_says_what_it_is_for_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a one-line docstring says what the file is for"
    assert len(text.splitlines()) <= MAX_FILE_LINES


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: the contract of an op may take its page."""
    first, docstring = function.body[0], ast.get_docstring(function)
    inside = 0 if docstring is None else first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - inside


def test_docstrings_do_not_count_as_lines():
    source = 'def f(x):\n    """One.\n\n    Two.\n    """\n    y = x\n    return y\n'
    assert num_lines(ast.parse(source).body[0]) == 3


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    is_kernel = path.name.startswith(("mosaic_", "pallas_"))
    limit = MAX_KERNEL_FUNCTION_LINES if is_kernel else MAX_FUNCTION_LINES
    too_long = [
        f"{node.name}: {num_lines(node)} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and num_lines(node) > limit
    ]
    assert too_long == []


@pytest.mark.parametrize("path", [p for p in TESTS if p.name.startswith("test_")], ids=relative)
def test_test_file_imports_what_it_mirrors(path: Path) -> None:
    inside = path.relative_to(ROOT / "tests")
    if inside.parts[0] not in PACKAGES:
        return
    mirrored = ROOT / inside.parent / inside.name.removeprefix("test_")
    package = mirrored.with_suffix("")
    assert mirrored.is_file() or package.is_dir(), f"{relative(mirrored)} does not exist"
    wanted = module_name(mirrored)
    modules = [module for _, module in imported_modules(path)]
    assert any(m == wanted or m.startswith(f"{wanted}.") for m in modules), (
        f"{relative(path)} must import {wanted}"
    )


def test_no_init_files_under_tests() -> None:
    assert [relative(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_top_level_names_are_the_agreed_ones() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {n for n in names if not n.startswith(".")} <= TOP_LEVEL_NAMES


def named_file(path: str, *, is_test: bool) -> Path | None:
    """The file that the document means; it names them below paxkv/ and tests/paxkv/, mostly."""
    below = (ROOT / "tests" / "paxkv", ROOT / "tests") if is_test else (ROOT / "paxkv",)
    roots = (*below, ROOT)
    exact = [root / path for root in roots if (root / path).is_file()]
    # A bare name is one of the few files that are talked about around it.
    anywhere = [p for p in SOURCES + TESTS if p.name == path]
    return next(iter(exact + anywhere), None)


def test_files_and_tests_that_the_architecture_names_exist() -> None:
    text = (ROOT / "paxkv" / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 200
    missing = []
    for path, test in named:
        is_test = bool(test) or Path(path).name.startswith("test_")
        found = named_file(path, is_test=is_test)
        pattern = rf"^(async )?(def|class) {test}\b|^{test} = "
        if found is None or (test and not re.search(pattern, found.read_text(), re.M)):
            missing.append(f"{path}::{test}")
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
