"""A paxkv server of one's own to put load on: its address, and what its two processes use."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.serve.completions_client import ServerError

ROOT = Path(__file__).resolve().parents[2]
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name, which may hold spaces: state is the first.
_UTIME, _STIME = 11, 12


class ServerProcess:
    """A server that is ready. Its engine is the one process that it has started.

    Args:
        url: Without the version, such as "http://127.0.0.1:43121".
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.url = url

    def pids(self) -> dict[str, int]:
        """Of both processes, by what they are."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        (engine_pid,) = " ".join(task.read_text() for task in tasks).split()
        return {"server": self._process.pid, "engine": int(engine_pid)}

    def cpu_s(self) -> dict[str, float]:
        """Processor time of all threads of each process since its start."""
        return {name: _cpu_s(pid) for name, pid in self.pids().items()}

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each process that is in RAM."""
        return {name: _resident_bytes(pid) for name, pid in self.pids().items()}

    def stop(self) -> int:
        """Asks it to end, as a user would, and returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_STOP_TIMEOUT_S)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(kilobytes)


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[ServerProcess]:
    """A server on a free loopback port; it is ended, by force if need be, when the block is left.

    Raises:
        ServerError: It ended before it was ready.
    """
    command = [sys.executable, "-m", "paxkv.serve", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    # A server that never gets ready is ended, so that reading its output ends too.
    watchdog = threading.Timer(_READY_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        url = _wait_until_ready(process)
        watchdog.cancel()
        yield ServerProcess(process, url)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if " is ready at " in line:
            return line.split(" is ready at ")[1].strip().removesuffix("/v1")
    raise ServerError(f"the server ended with code {process.wait()} before it was ready.")
