"""Forked processes end with the test process that started them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.killed_after import killed_after
from tests.paxkv.fleet.test_engine_process import wait_for_end
from tests.paxkv.forked_processes import ROOT

_STOPS_ITSELF = """
import os, signal, sys
from tests.paxkv import forked_processes

forked_processes._END_S = 0.1
sys.exit(forked_processes.serve_forks(lambda _: os.kill(os.getpid(), signal.SIGSTOP)))
"""
_TEST_PROCESS = """
from tests.paxkv.forked_processes import ForkedProcesses

processes = ForkedProcesses("stops_itself")
process = processes.start_server([])
print(processes._process.pid, process.pid, flush=True)
input()
"""


def test_killed_test_process_leaves_no_stopped_process(tmp_path: Path) -> None:
    (tmp_path / "stops_itself.py").write_text(_STOPS_ITSELF)
    with subprocess.Popen(
        [sys.executable, "-c", _TEST_PROCESS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as test_process:
        try:
            with killed_after(60, test_process):
                pids = test_process.stdout.readline().split()
        finally:
            test_process.kill()
    for pid in pids:
        wait_for_end(int(pid))
