"""Starts `python -m paxkv.serve` as a user would, on a free loopback port."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 420
STOP_TIMEOUT_S = 60


class RealServer:
    """A running server process and its address, such as "http://127.0.0.1:43121"."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> int:
        """Asks it to end and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def running_server(*arguments: str, stderr: IO[bytes] | None = None) -> Iterator[RealServer]:
    """A server that is ready; it is ended, by force if need be, when the block is left.

    Args:
        stderr: Gets what it says there; None is the test's own.
    """
    command = [sys.executable, "-m", "paxkv.serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": ""},
    )
    # A server that never gets ready is ended, so that reading its output ends too.
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if " is ready at " in line:
                url = line.split(" is ready at ")[1].strip().removesuffix("/v1")
                break
        else:
            raise RuntimeError(f"{command} ended with code {process.wait()} before it was ready")
        watchdog.cancel()
        yield RealServer(process, url)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
