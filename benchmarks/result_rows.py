"""Result rows: one JSON line per figure, with everything needed to measure it again."""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS_FOLDER = (Path(__file__).parent / "results").resolve()
# The field that marks rows of rehearsals, whose figures are meaningless.
REHEARSAL = "rehearsal"
_PACKAGES = ("paxkv", "jax", "numpy")
# Peers of paxkv. Rows have their versions only if they are installed.
_PEER_PACKAGES = ("torch", "transformers")
# Flags of /proc/cpuinfo, the newest first.
_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One figure.

    Args:
        benchmark: Module name of the benchmark.
        case: What was measured, with its parameters.
        metric: Name of the figure with its unit, such as `waste_percent`.
        values: One per repetition; empty in a row that says why there is no figure.
        device: The chip that did the work; for host benchmarks, the processor.
        details: More fields of the row. They override fields that every row has.
    """

    benchmark: str
    case: str
    metric: str
    values: Sequence[float]
    device: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, object]:
        figures: dict[str, float] = {}
        if self.values:
            figures = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "benchmark": self.benchmark,
            "case": self.case,
            "metric": self.metric,
            **figures,
            "num_repetitions": len(self.values),
            "device": self.device,
            "versions": package_versions(),
            "commit": commit_hash(),
            "command": f"python -m {self.benchmark} {' '.join(sys.argv[1:])}".strip(),
            **self.details,
        }


def processor_name() -> str:
    """The host's processor: its name and, if /proc/cpuinfo has them, family and vector extension.

    Clouds give several generations of a processor one name, but their figures differ.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        name = _name_in_cpuinfo(cpuinfo.read_text())
        if name is not None:
            return name
    return platform.processor() or platform.machine()


def _name_in_cpuinfo(text: str) -> str | None:
    """Reads the first block; None if it has no name, as on some processors other than x86."""
    first = text.split("\n\n", 1)[0]
    fields = {
        key.strip(): value.strip()
        for key, colon, value in (line.partition(":") for line in first.splitlines())
        if colon
    }
    name = fields.get("model name")
    if name is None or not {"cpu family", "model"} <= fields.keys():
        return name
    flags = set(fields.get("flags", "").split())
    vectors = [label for flag, label in _VECTORS if flag in flags][:1]
    generation = f"family {fields['cpu family']} model {fields['model']}"
    return f"{name} ({', '.join([generation, *vectors])})"


def append_rows(rows: Sequence[ResultRow], file: Path) -> None:
    """Appends rows to a file of JSON lines, which is created if missing.

    All rows are written at once, so a process that is killed leaves all of them or none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write("".join(json.dumps(row.as_dict()) + "\n" for row in rows))


def drop_unfinished_line(file: Path) -> None:
    """Cuts off an incomplete last line, which a full disk or a lost machine can leave."""
    if not file.is_file():
        return
    written = file.read_bytes()
    end = written.rfind(b"\n") + 1
    if end < len(written):
        with file.open("r+b") as out:
            out.truncate(end)


@functools.cache
def package_versions() -> dict[str, str]:
    """Package -> version, for Python and all packages that figures depend on."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_PEER_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _PACKAGES:
                versions[package] = "not installed"
    return versions


@functools.cache
def commit_hash() -> str:
    """Short hash of the commit, with "+" if tracked files differ from it; "unknown" without git.

    Cached at the first call, because a run measures the code that it started with.
    """
    if shutil.which("git") is None:
        return "unknown"
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if dirty else "")
