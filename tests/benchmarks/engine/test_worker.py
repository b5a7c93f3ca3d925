"""An engine's CPU time is that of all of its processes."""

import subprocess
import sys
import time

from benchmarks.engine.worker import cpu_time_s

BURN = """
import sys, time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("burned", flush=True)
sys.stdin.read()
"""


def test_cpu_time_of_processes_that_run_counts() -> None:
    before_s, own_s = cpu_time_s(), time.process_time()
    child = subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        child.stdout.readline()
        took_s, own_s = cpu_time_s() - before_s, time.process_time() - own_s
        child.stdin.close()
    assert took_s - own_s >= 0.28
