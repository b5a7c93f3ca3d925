"""Fake engine processes that are forked, which saves the time that imports of a command take."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import pytest

from paxkv.engine.core_process import leave_signals_to_parent, run_engine_process
from paxkv.fleet import engine_process
from tests.paxkv.engine.fake_engine_process import build, build_follower
from tests.paxkv.forked_processes import ForkedProcesses, forked_processes, serve_forks


@contextlib.contextmanager
def forking_process() -> Iterator[ForkedProcesses]:
    """A process that forks fake engines, for `engines_forked_by`. Several tests may share it."""
    with forked_processes("tests.paxkv.engine.forked_engines") as processes:
        yield processes


@contextlib.contextmanager
def engines_forked_by(process: ForkedProcesses) -> Iterator[None]:
    """Inside, each `EngineProcess` is a fork of this process and ignores its command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "_spawn", process.spawn_engine)
        yield


@contextlib.contextmanager
def engines_forked_by_a_new_process() -> Iterator[None]:
    """As `engines_forked_by`, with a process of its own, which ends with the block."""
    with forking_process() as process, engines_forked_by(process):
        yield


class ForkedChild:
    """As much of `subprocess.Popen` as `EngineProcess` uses, for a process that `os.fork` made."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_engine(command: Sequence[str], environment: Mapping[str, str], file: int) -> ForkedChild:
    """As `_spawn` of `paxkv.fleet.engine_process`, but forks this process and ignores the command.

    Like an engine that runs the command, the engine is a child of its server and in its process
    group.
    """
    their_in, our_in = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, a fork of a process with threads causes a warning. The engine uses no
        # lock that these threads might hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(their_in)
        return ForkedChild(pid, os.fdopen(our_in, "wb", buffering=0))
    code = 1
    try:
        os.dup2(their_in, 0)
        # Close connections of the server's clients: each stays open while any process has it open.
        os.closerange(3, file)
        os.closerange(file + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.update(environment)
        code = _run_engine(())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_engine(_: Sequence[str]) -> int:
    leave_signals_to_parent()
    return run_engine_process(build, build_follower)


if __name__ == "__main__":
    sys.exit(serve_forks(_run_engine))
