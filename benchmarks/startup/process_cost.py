"""CPU seconds and memory of a process and its descendants, read from Linux's /proc."""

import os
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")
_MIB = 2**20


def process_cost(root_pid: int, proc: Path = _PROC) -> dict[str, float]:
    """The cost until now of a running process and all its descendants that still run.

    Returns:
        "cpu_s": user and system time, including children that have ended. "peak_rss_mib": the sum
        of the processes' peaks of resident memory. "rss_mib": resident memory now.
        "anonymous_mib": the part of it that is not a file. Empty on a system without /proc.
    """
    if not (proc / str(os.getpid())).is_dir():
        return {}
    costs = [_cost_of(proc / str(pid)) for pid in _descendants(root_pid, _parents(proc))]
    return {name: sum(cost[name] for cost in costs) for name in costs[0]}


def _parents(proc: Path) -> dict[int, int]:
    """The parent of every running process, by process id."""
    found = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                found[int(folder.name)] = int(_stat_fields(folder)[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process ended after the folder was listed
    return found


def _descendants(root_pid: int, parents: Mapping[int, int]) -> list[int]:
    """Ids of the process, which comes first, and of all its descendants."""
    found = [root_pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _stat_fields(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold spaces."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _cost_of(folder: Path) -> dict[str, float]:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # utime, stime, cutime and cstime are fields 14 to 17 of proc(5), and the state is field 3.
    num_ticks = sum(map(int, _stat_fields(folder)[11:15]))
    lines = (line.split() for line in (folder / "status").read_text().splitlines())
    kib = {line[0]: int(line[1]) for line in lines if line[-1:] == ["kB"]}
    return {
        "cpu_s": num_ticks / ticks_per_s,
        "peak_rss_mib": kib["VmHWM:"] * 1024 / _MIB,
        "rss_mib": kib["VmRSS:"] * 1024 / _MIB,
        "anonymous_mib": kib["RssAnon:"] * 1024 / _MIB,
    }
