"""The cost of a server counts its engine processes, and no others."""

import os
import subprocess
import sys

import pytest

from benchmarks.startup.process_cost import process_cost
from tests.killed_after import killed_after


def _write_process(proc, pid, parent, *, num_ticks, peak_kib) -> None:
    (proc / str(pid)).mkdir()
    times = f"{num_ticks} 1 2 3"  # user, system, and both of children that ended
    (proc / str(pid) / "stat").write_text(f"{pid} (a b) c) S {parent} 0 0 0 0 0 0 0 0 0 {times} 9")
    (proc / str(pid) / "status").write_text(
        f"Name:\tx\nVmHWM:\t{peak_kib} kB\nVmRSS:\t1024 kB\nRssAnon:\t512 kB\nThreads:\t3\n"
    )


def test_descendants_are_summed_and_other_processes_left_out(tmp_path) -> None:
    (tmp_path / "meminfo").write_text("no process")
    tree = {os.getpid(): 0, 7: 1, 8: 7, 9: 8, 10: 1}
    for pid, parent in tree.items():
        _write_process(tmp_path, pid, parent, num_ticks=pid, peak_kib=pid * 1024)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert process_cost(7, tmp_path) == {
        "cpu_s": pytest.approx((7 + 8 + 9 + 3 * 6) / ticks_per_s),
        "peak_rss_mib": 24,
        "rss_mib": 3,
        "anonymous_mib": 1.5,
    }


def test_system_without_proc_has_no_figures(tmp_path) -> None:
    assert process_cost(1, tmp_path) == {}


def test_peak_of_a_real_process_counts_memory_that_it_gave_back() -> None:
    code = "x = bytearray(200 * 2**20); del x; print('freed', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with killed_after(60, process):
            assert process.stdout.readline() == "freed\n"
        cost = process_cost(process.pid)
        assert cost["peak_rss_mib"] > 200 > cost["rss_mib"] > 0
    finally:
        process.communicate("\n", timeout=20)
