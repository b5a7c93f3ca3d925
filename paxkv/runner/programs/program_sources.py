"""The source files that a compiled step depends on, and one digest of all of them."""

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
# The packages that `paxkv.runner` may import (`tests/test_architecture.py`), and itself.
_SOURCES = (
    *("models", "pallas_kernels", "paxkv/runner", "paxkv/config", "paxkv/contracts"),
    *("paxkv/errors.py", "paxkv/__init__.py"),
)
_IMPORTED_AT = time.time()


@functools.cache
def source_digest(packages: frozenset[str] = frozenset()) -> str:
    """SHA-256 of the names and contents of the source files that a compiled step depends on.

    The digest is random, so that no other process has it, if one of `packages` has no source files,
    or if a file was written after this process started. Such a file may differ from the code that
    runs here.

    Args:
        packages: `LoadedModel.packages`. All files of packages from elsewhere count.
    """
    files = {path.relative_to(_ROOT).as_posix(): path for path in program_source_files()}
    for package in packages - {"models", "pallas_kernels", "paxkv"}:
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


def program_source_files() -> list[Path]:
    """Returns the source files of paxkv that a step may depend on, sorted."""
    found: set[Path] = set()
    for path in (_ROOT / name for name in _SOURCES):
        found |= {path} if path.is_file() else set(path.rglob("*.py"))
    return sorted(found)


def _files_of_other_package(package: str) -> dict[str, Path]:
    """Maps names to source files, for an imported package or a module that is a single file.

    The files of a single-file module include the files and packages beside it that it imports.
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
    """Maps names to source files: `file` and the files of its folder that it needs for its imports.

    An installed file stands alone, because the files beside it are other installed packages. The
    identity has the versions of the packages that matter.
    """
    folder = file.parent
    is_installed = folder in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found, waiting = {file}, [] if is_installed else [file]
    while waiting:
        for package in _imported_packages(waiting.pop()):
            candidates = [folder / f"{package}.py", *(folder / package).rglob("*.py")]
            new = {path for path in candidates if path.is_file()} - found
            found |= new
            waiting += new
    return {path.relative_to(folder).as_posix(): path for path in found}


def _imported_packages(path: Path) -> Iterator[str]:
    """Yields the top-level names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]
