"""Fails a test that takes too long, so that a process which hangs does not stop the whole run."""

import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator

import pytest

# Of the setup, the call and the teardown of a test, each. The first test that needs a compiled
# server waits for its programs: half a minute on two busy cores.
LIMIT_S = 300.0
SLOW_LIMIT_S = 3600.0
# The exception is raised again after this time, in case a callback's caller has swallowed it.
_REPEAT_S = 5.0


def limit_of(item: pytest.Item) -> float:
    """Seconds that each phase of a test may take: from the mark `time_limit`, or a default."""
    mark = item.get_closest_marker("time_limit")
    if mark is not None:
        return float(mark.args[0])
    return SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S


@contextlib.contextmanager
def time_limit(limit_s: float, repeat_s: float = _REPEAT_S) -> Iterator[None]:
    """Fails the test in the main thread if the block takes longer than `limit_s` seconds.

    The exception interrupts waiting for a process, a socket or a lock, so fixtures and `finally`
    clauses end what the test started. A call into compiled code is interrupted when it returns.
    """

    def fail(*_: object) -> None:
        for thread_id, frame in sys._current_frames().items():
            print(f"Stack of thread {thread_id}:", file=sys.stderr)
            traceback.print_stack(frame, file=sys.stderr)
        pytest.fail(f"the test took longer than its limit of {limit_s:g} s")

    earlier = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit_s, repeat_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
