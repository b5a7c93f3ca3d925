"""Which of our source files decide what a step computes, and one digest of them."""

import ast
import functools
import hashlib
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
# Kernel bodies and model families are imported by name, so no closure of imports finds them.
_WHOLE_PACKAGES = ("models", "pallas_kernels")
_CLOSURE_OF = "paxkv.runner"
_IMPORTED_AT = time.time()


@functools.cache
def source_digest(packages: frozenset[str] = frozenset()) -> str:
    """SHA-256 of the source files that a compiled step depends on, names included.

    A file that was written after this process started may differ from the code that runs here. The
    digest is then a random one, which no other process has. The same holds for a package without
    source files.

    Args:
        packages: `LoadedModel.packages`; all their files count, ours only if a step needs them.
    """
    files = {path.relative_to(_ROOT).as_posix(): path for path in program_source_files(_ROOT)}
    for package in packages - {*_WHOLE_PACKAGES, "paxkv"}:
        of_package = _files_of_other_package(package)
        if not of_package:
            return uuid.uuid4().hex
        files |= of_package
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path.stat().st_mtime > _IMPORTED_AT:
            return uuid.uuid4().hex
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files_of_other_package(package: str) -> dict[str, Path]:
    """Name to source file, of an imported package or of a module that is a single file.

    Those of a single file include the files and packages beside it that it imports.
    """
    module = sys.modules[package]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    file = getattr(module, "__file__", None)
    if folders:
        return {
            f"{package}/{path.relative_to(folder).as_posix()}": path
            for folder in folders
            for path in folder.rglob("*.py")
        }
    return {} if file is None else _files_beside(Path(file))


def _files_beside(file: Path) -> dict[str, Path]:
    """Name to source file: a file, and what it imports, directly or not, from its own folder."""
    folder = file.parent
    # Installed packages lie beside each other; the versions of those that matter are known.
    is_installed = folder in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found, waiting = {file}, [] if is_installed else [file]
    while waiting:
        for module in _imported_modules(waiting.pop()):
            top = folder / module.partition(".")[0]
            candidates = [top.with_suffix(".py"), *top.rglob("*.py")]
            new = {path for path in candidates if path.is_file()} - found
            found |= new
            waiting += new
    return {path.relative_to(folder).as_posix(): path for path in found}


def program_source_files(root: Path) -> list[Path]:
    """All of `models/` and `pallas_kernels/`, and what `paxkv.runner` imports of paxkv, sorted.

    Args:
        root: The folder that holds the three packages.
    """
    found = {path for package in _WHOLE_PACKAGES for path in (root / package).rglob("*.py")}
    waiting = [_CLOSURE_OF]
    while waiting:
        for path in _files_of(root, waiting.pop()):
            if path not in found:
                found.add(path)
                waiting += _imported_modules(path)
    return sorted(found)


def _files_of(root: Path, module: str) -> Iterator[Path]:
    """A module's file, and the `__init__.py` of each package around it, which Python runs first.

    Nothing for modules outside paxkv, and for names that are not modules.
    """
    parts = module.split(".")
    if parts[0] != "paxkv":
        return
    for end in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:end])
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        yield from (candidate for candidate in candidates if candidate.is_file())


def _imported_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports at its top; `from a import b` counts as `a.b`."""
    for node in _module_level(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those of functions, nor those for type checkers."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _module_level(node.orelse)
            continue
        yield node
        for inner in ("body", "orelse", "finalbody"):
            yield from _module_level(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _module_level(handler.body)
