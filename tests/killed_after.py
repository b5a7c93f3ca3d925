"""Limits how long a test reads what a process prints."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class _Process(Protocol):
    def kill(self) -> None: ...


@contextlib.contextmanager
def killed_after(timeout_s: float, process: _Process) -> Iterator[None]:
    """Kills the process if the block takes longer. Its output ends then, and so does reading it."""
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
