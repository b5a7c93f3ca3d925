"""`StepCounter`: memory of two processes, in which an engine says that it gets on."""

import mmap
import os
import tempfile
from typing import Self

_NUM_BYTES = 8


class StepCounter:
    """A number that the engine counts up with every step, and where it wakes and goes to sleep.

    It is no message: an engine that hangs sends none, and one that is idle sends none either. A
    count tells them apart, at the price of a write to memory a step.

    Args:
        file: Descriptor of `_NUM_BYTES`; the caller may close it afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _NUM_BYTES)
        # One aligned word: whoever reads it while it is written sees the old or the new count.
        self._count = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A counter and the descriptor for the other process; the caller closes it."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("paxkv-step-counter")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, _NUM_BYTES)
        return cls(file), file

    @property
    def count(self) -> int:
        """Even while the engine waits for its clients."""
        return self._count[0]

    def note_wake(self) -> None:
        self._count[0] |= 1

    def note_step(self) -> None:
        self._count[0] += 2

    def note_sleep(self) -> None:
        self._count[0] += self._count[0] & 1
