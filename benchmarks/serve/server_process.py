"""Starts a paxkv server for a benchmark, and measures the memory of its two processes."""

import contextlib
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


class ServerProcess:
    """A server that is ready. Its only child process is the engine.

    Args:
        url: Without the version, such as "http://127.0.0.1:43121".
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.url = url

    def pids(self) -> dict[str, int]:
        """Process ids by name: "server" and "engine"."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        (engine_pid,) = " ".join(task.read_text() for task in tasks).split()
        return {"server": self._process.pid, "engine": int(engine_pid)}

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of each process."""
        return {name: _resident_bytes(pid) for name, pid in self.pids().items()}

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_STOP_TIMEOUT_S)


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(kilobytes)


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[ServerProcess]:
    """Starts a server on a free loopback port, and stops it at the end of the `with` block.

    Raises:
        ServerError: The server ended before it was ready.
    """
    command = [sys.executable, "-m", "paxkv.serve", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    # Kills a server that never becomes ready, so that reading its output ends.
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
