"""Starts an engine in a separate process, pinned to processors, and runs workloads on it."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.engine.offline_engine import EngineRun, EngineSpec, Setting

ROOT = Path(__file__).resolve().parents[2]
_NUM_LOG_LINES = 25
# Longer than any step.
_CLOSE_TIMEOUT_S = 60.0


class EngineProcessError(RuntimeError):
    """An engine could not be loaded or failed in a run; the message says which and why."""


class EngineProcess:
    """One engine's process. Close it, or use it as a context manager.

    Args:
        workload_file: Written by `Workload.write`.
        log_file: Receives what the process and its libraries print.

    Raises:
        EngineProcessError: The engine could not be loaded.
    """

    def __init__(self, spec: EngineSpec, workload_file: Path, log_file: Path) -> None:
        self._spec = spec
        self._log_file = log_file
        with log_file.open("w") as log, pinned(spec.num_threads):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine.worker"],
                cwd=ROOT,
                env=os.environ | _thread_settings(spec.num_threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._ask({"spec": dataclasses.asdict(spec), "workload": str(workload_file)})
        except BaseException:
            self._kill()
            raise

    def run(self, settings: Mapping[str, Setting], *, is_warm_up: bool = False) -> EngineRun:
        """Runs the workload, or a small part of it to warm up.

        Raises:
            EngineProcessError: The engine failed.
        """
        answer = self._ask({"command": "run", "settings": dict(settings), "is_warm_up": is_warm_up})
        return EngineRun(**answer)

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        """Logit of `first` minus that of `second` after `token_ids`.

        Raises:
            EngineProcessError: The engine failed, or cannot compute it.
        """
        command = {"command": "logit_gap", "first": first, "second": second}
        return self._ask(command | {"token_ids": token_ids})["logit_gap"]

    def close(self) -> None:
        """Ends the process; may be repeated."""
        # A process that has ended has closed its end of the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _kill(self) -> None:
        self._process.kill()
        self.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        # Do not wait for the end of an interrupted run.
        if exc_type is None:
            self.close()
        else:
            self._kill()

    def _ask(self, command: Mapping[str, object]) -> dict[str, object]:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            # Wait for the process: it closes its pipe before it writes the reason to the log.
            self.close()
            lines = self._log_file.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
            raise EngineProcessError(f"{self._spec.module} died:\n" + "\n".join(lines))
        answer = json.loads(line)
        if "error" in answer:
            raise EngineProcessError(f"{self._spec.module}: {answer['error']}")
        return answer


@contextlib.contextmanager
def pinned(num_threads: int) -> Iterator[None]:
    """Keeps processes that are started in this block on `num_threads` processors.

    They are pinned from their first moment, because JAX and torch choose their number of threads by
    the processors that they see.

    Raises:
        ValueError: There are fewer processors.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("this system cannot pin processes to processors; Linux can.")
    allowed = os.sched_getaffinity(0)
    if num_threads > len(allowed):
        raise ValueError(
            f"num_threads={num_threads} is more than the {len(allowed)} processors of this machine."
        )
    # The last processors, because interrupts mostly go to the first.
    os.sched_setaffinity(0, set(sorted(allowed)[-num_threads:]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _thread_settings(num_threads: int) -> dict[str, str]:
    """Environment variables that would otherwise make libraries start more threads."""
    names = ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads))
