"""Two processes share a step counter."""

import os
import subprocess
import sys

from paxkv.contracts.step_counter import StepCounter

_OTHER = """
import sys
from paxkv.contracts.step_counter import StepCounter
counter = StepCounter(int(sys.argv[1]))
counter.count_wake()
counter.count_step()
counter.count_sleep()
"""


def test_count_is_shared_with_another_process():
    counter, file = StepCounter.create()
    assert counter.count == 0
    subprocess.run(
        [sys.executable, "-c", _OTHER, str(file)], pass_fds=(file,), check=True, timeout=120
    )
    os.close(file)
    assert counter.count == 4


def test_counter_works_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    counter, file = StepCounter.create()
    other = StepCounter(file)
    os.close(file)
    other.count_wake()
    assert counter.count == 1


def test_count_is_odd_while_the_engine_is_awake():
    counter, file = StepCounter.create()
    os.close(file)
    counts = []
    for method in (counter.count_sleep, counter.count_wake, counter.count_step, counter.count_wake):
        method()
        counts.append(counter.count)
    counter.count_sleep()
    counter.count_sleep()
    assert (counts, counter.count) == ([0, 1, 3, 3], 4)
