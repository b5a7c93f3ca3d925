"""The demo model's compiled programs, which a test run makes once for all of its workers."""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from paxkv.runner.programs.program_sources import source_digest

ROOT = Path(__file__).resolve().parents[1]
# With the default of 64 requests and 512 tokens, the programs take more than twice as long to
# compile: each kind has more sizes.
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
FLAGS = tuple(
    text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))
)


@functools.cache
def demo_programs() -> Path:
    """A `--compiled-dir` for the demo model's architecture with `SETTINGS`.

    The first caller of the run compiles it as a user would, except for the flags of XLA that all
    processes of tests have (`tests/compiler_flags.py`); callers in other processes wait. The folder
    is in JAX's own cache. Runs that share it, as runs of mutants do, compile again only after a
    change that can change a program.
    """
    # `tests/conftest.py` sets the variable, and workers of pytest-xdist inherit it.
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"demo-programs-{source_digest()[:16]}"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            being_made = Path(f"{path}.being-made")
            shutil.rmtree(being_made, ignore_errors=True)
            # Weights shape no program.
            arguments = ("--out", str(being_made), "--load-format", "dummy", *FLAGS)
            subprocess.run(
                [sys.executable, "-m", "paxkv.compile", *arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONWARNINGS": ""},
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=280,
            )
            being_made.rename(path)
    return path
