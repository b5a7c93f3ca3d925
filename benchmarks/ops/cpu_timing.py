"""How the CPU half of the benchmark takes time: one core, calls in turn, bandwidth in the same run.

A sample is CPU time of the process. With one core and nothing to wait for, that is the wall time of
a machine that does nothing else; on one that does, it leaves out what others took, though not what
their traffic on the memory bus costs.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

# A call gets the number of the data set to work on, and returns when it is done.
Call = Callable[[int], object]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and all threads started in here, on one core.

    JAX starts its threads with its first computation: enter this before. Where the system cannot
    pin threads (it can on Linux), this does nothing.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    # The last one: interrupts mostly go to the first.
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def sample_in_turn(
    calls: Mapping[str, Call], *, num_data_sets: int, num_samples: int
) -> dict[str, list[float]]:
    """Seconds a call, one figure a sample: every sample runs each call once on every data set.

    In turn, so that what changes while the machine is busy hits all of them alike, and the ratio of
    two samples of the same number is a fair one.
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
    """Of two calls' samples, pair by pair."""
    return [x / y for x, y in zip(numerator, denominator, strict=True)]


class SequentialReads:
    """Reads of memory from one end to the other: the floor of what reads as many bytes.

    NumPy's maximum, a loop of vector loads and nothing else to speak of. A caller that has a faster
    reader hands it in, and the faster of the two is the floor.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = np.ones(num_bytes // 4, np.float32)
        self._next = 0

    def call(
        self, num_bytes: int, read: Callable[[np.ndarray], object] = np.max
    ) -> Callable[[int], object]:
        """A call that reads `num_bytes` which were not read for as long as possible."""
        size = num_bytes // 4
        num_places = len(self._buffer) // size
        if num_places < 2:
            raise ValueError(
                f"buffer is too small: got {self._buffer.nbytes} bytes, wanted at least twice "
                f"the {num_bytes} of one read."
            )

        def run(data_idx: int) -> object:
            del data_idx
            self._next = (self._next + 1) % num_places
            return read(self._buffer[self._next * size : (self._next + 1) * size])

        return run


def fastest(seconds: Mapping[str, list[float]], names: tuple[str, ...]) -> list[float]:
    """The samples of the call with the least median, among those of `names` that were made."""
    made = [seconds[name] for name in names if name in seconds]
    return min(made, key=statistics.median)
