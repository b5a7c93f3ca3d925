"""`paxkv bench NAME`: runs a benchmark of a source checkout."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import paxkv

# vLLM's name of a benchmark -> paxkv's name.
_PAXKV_NAMES = {"throughput": "engine"}
_SOURCE_PACKAGES = ("paxkv", "benchmarks", "models", "pallas_kernels")
_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m benchmarks.NAME` with the remaining words.

    The installed package has no benchmarks. They include plots, baselines and result files, and
    are run in a checkout, where the measured commit is known.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    folder = Path(paxkv.__file__).resolve().parents[1] / "benchmarks"
    if not (folder / "__init__.py").is_file():
        print(
            "paxkv: error: benchmarks are in the source checkout, and not installed with the "
            "package. Clone it, `pip install -e '.[bench]'` there, and run this again.",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: paxkv bench NAME [...]\n\nbenchmarks: {', '.join(_names(folder))}")
        return 0 if words else _USAGE_ERROR
    name = _PAXKV_NAMES.get(words[0], words[0])
    module = f"benchmarks.{name}"
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    if name not in _names(folder) or importlib.util.find_spec(module) is None:
        names = ", ".join(_names(folder))
        print(f"paxkv: error: no benchmark {words[0]!r}; there are {names}.", file=sys.stderr)
        return _USAGE_ERROR
    sys.argv = [f"paxkv bench {words[0]}", *words[1:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", *_SOURCE_PACKAGES):
            raise
        print(
            f"paxkv: error: {words[0]} needs {error.name}: `pip install -e '.[bench]'` in "
            f"{folder.parent}.",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _names(folder: Path) -> list[str]:
    """Names of runnable benchmarks: packages with a `__main__`, and files with a main function."""
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    files = {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text()}
    return sorted(packages | files)
