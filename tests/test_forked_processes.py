"""Forked processes end with the test process that started them, and show what they wrote."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.killed_after import killed_after
from tests.paxkv.fleet.test_engine_process import wait_for_end
from tests.paxkv.forked_processes import ROOT, forked_processes

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
_WRITES_TO_STDERR = """
import sys, time
from tests.paxkv import forked_processes

def main(arguments):
    print("a server's log", file=sys.stderr, flush=True)
    print("has started", flush=True)
    time.sleep(float(arguments[0]))
    return 1

sys.exit(forked_processes.serve_forks(main))
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


def test_failed_test_shows_what_a_server_wrote_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "writes_to_stderr.py").write_text(_WRITES_TO_STDERR)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forked_processes("writes_to_stderr") as processes:
        with pytest.raises(AssertionError), processes.start_server(["3600"]) as process:
            with killed_after(60, process):
                line = process.stdout.readline()
            # Fails, as a test might: the line is "has started".
            assert line == ""
        assert process.returncode == -signal.SIGKILL
        assert capsys.readouterr().err == "a server's log\n"
        # The test reads it and fails later.
        with processes.start_server(["0"]) as process:
            assert process.communicate(timeout=60) == ("has started\n", "a server's log\n")
        assert capsys.readouterr().err == "a server's log\n"
