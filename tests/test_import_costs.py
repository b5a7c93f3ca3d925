"""What an import brings along: no JAX for the host half, no HTTP libraries for the engine."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Libraries that only the server needs.
OF_SERVER = ("starlette", "uvicorn", "prometheus_client")


def test_importing_paxkv_imports_no_jax() -> None:
    program = (
        "import sys, paxkv, paxkv.scheduler.scheduler, paxkv.client.async_client, "
        "paxkv.engine.engine_core, paxkv.server.app, paxkv.replay, paxkv.serve, "
        "paxkv.entrypoints.cli.main, paxkv.entrypoints.cli.chat, paxkv.entrypoints.cli.bench, "
        "paxkv.entrypoints.cli.run_batch; "
        "sys.exit('jax' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120
        ).returncode
        == 0
    )


def imported_at_once(block: ast.AST) -> Iterator[str]:
    """Modules that the block imports when it runs, without those of functions and type checkers."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from paxkv import errors` imports the module paxkv.errors.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for other in node.orelse for name in imported_at_once(other))
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With | ast.ClassDef):
            yield from imported_at_once(node)


def all_imported(*names: str) -> set[str]:
    """All modules that are loaded if these are imported, as the project's sources say.

    These modules are included, and the packages that contain a module. What other projects' modules
    import is not.
    """
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        parent, _, _ = name.rpartition(".")
        left += [parent] * bool(parent)
        path = ROOT / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file():
            left += imported_at_once(ast.parse(path.read_text()))
    return found


def test_engine_and_llm_import_none_of_the_servers_libraries() -> None:
    imported = all_imported("paxkv.llm", "paxkv.engine.engine_core")
    assert {"jax", "paxkv.runner.model_runner", "paxkv.scheduler.scheduler"} <= imported
    assert imported.isdisjoint(OF_SERVER)
    assert set(OF_SERVER) <= all_imported("paxkv.serve")


@pytest.mark.slow  # It imports JAX.
def test_engine_and_llm_import_without_the_servers_libraries() -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({OF_SERVER})); "
        "import paxkv.llm, paxkv.engine.engine_core"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120
        ).returncode
        == 0
    )


def test_importing_paxkv_alone_imports_next_to_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import paxkv; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'paxkv'})); "
        "print(sorted(name for name in sys.modules if name.startswith('paxkv.'))); "
        "paxkv.SamplingParams, paxkv.BeamSearchParams, paxkv.StructuredOutputsParams"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")
