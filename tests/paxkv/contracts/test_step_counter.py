"""A count that two processes share."""

import os
import subprocess
import sys

from paxkv.contracts.step_counter import StepCounter

_OTHER = """
import sys
from paxkv.contracts.step_counter import StepCounter
counter = StepCounter(int(sys.argv[1]))
counter.begin_step()
counter.end_step()
counter.begin_step()
"""


def test_other_process_counts_what_this_one_reads():
    counter, file = StepCounter.create()
    assert counter.count == 0
    subprocess.run([sys.executable, "-c", _OTHER, str(file)], pass_fds=(file,), check=True)
    os.close(file)
    assert counter.count == 3


def test_counter_needs_no_special_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    counter, file = StepCounter.create()
    other = StepCounter(file)
    os.close(file)
    other.begin_step()
    assert counter.count == 1
