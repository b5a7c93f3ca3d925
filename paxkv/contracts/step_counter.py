"""`StepCounter`: shared memory in which an engine process shows that it makes progress."""

import mmap
import os
import tempfile
from typing import Self

_NUM_BYTES = 8


class StepCounter:
    """A number that the engine increases with every step, and when it wakes up or goes to sleep.

    Its client can thus distinguish an engine that hangs from an idle one; neither sends messages.
    The cost is one write to memory per step.

    Args:
        file: Descriptor of a file of `_NUM_BYTES`. The caller may close it afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _NUM_BYTES)
        # One aligned word, so a concurrent reader sees either the old or the new count.
        self._count = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A counter, and a descriptor for the other process, which the caller must close."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("paxkv-step-counter")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, _NUM_BYTES)
        return cls(file), file

    @property
    def count(self) -> int:
        """The current number. It is even while the engine sleeps until a message arrives."""
        return self._count[0]

    def count_wake(self) -> None:
        self._count[0] |= 1

    def count_step(self) -> None:
        self._count[0] += 2

    def count_sleep(self) -> None:
        self._count[0] += self._count[0] & 1
