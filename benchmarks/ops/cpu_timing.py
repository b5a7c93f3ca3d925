"""Timing on a CPU: one core, calls in turn, and memory bandwidth in the same run.

A sample is CPU time of the process. On one core of an idle machine it equals wall time. On a busy
machine it excludes the time of other processes, but not the cost of their memory traffic.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

# A call gets the index of its data set.
Call = Callable[[int], object]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and all threads that it starts, on one core.

    Enter it before JAX's first computation, which starts JAX's threads. It does nothing on systems
    that cannot pin threads; Linux can.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    # The last core, because interrupts mostly go to the first.
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def sample_in_turn(
    calls: Mapping[str, Call], *, num_data_sets: int, num_samples: int
) -> dict[str, list[float]]:
    """Seconds per call, one value per sample; a sample runs the call once on every data set.

    The calls run in turn, so that changes of the machine's load affect all of them alike, and the
    ratio of two samples with the same index is fair.
    """
    for call in calls.values():
        for data_idx in range(num_data_sets):
            call(data_idx)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_samples):
        for name, call in calls.items():
            start = time.process_time()
            for data_idx in range(num_data_sets):
                call(data_idx)
            seconds[name].append((time.process_time() - start) / num_data_sets)
    return seconds


def ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    """Ratios of the samples of two calls with the same index."""
    return [x / y for x, y in zip(numerator, denominator, strict=True)]


class SequentialReads:
    """Sequential reads of memory by NumPy's maximum, which is a loop of vector loads."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = np.ones(num_bytes // 4, np.float32)
        self._next = 0

    def call(self, num_bytes: int) -> Call:
        """A call that reads the `num_bytes` of the buffer that were read longest ago."""
        size = num_bytes // 4
        num_places = len(self._buffer) // size
        if num_places < 2:
            raise ValueError(
                f"buffer is too small: got {self._buffer.nbytes} bytes, needs at least twice "
                f"the {num_bytes} of one read."
            )

        def run(data_idx: int) -> object:
            del data_idx
            self._next = (self._next + 1) % num_places
            return np.max(self._buffer[self._next * size : (self._next + 1) * size])

        return run
