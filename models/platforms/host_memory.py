"""How much of the host's memory this process can still take."""

import os
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")


class _ControlGroup(NamedTuple):
    """Files of the group that this process is in, as a container sees them."""

    folder: Path
    limit: str
    usage: str
    stat_prefix: str  # of the lines of memory.stat that count the groups below it too


_CONTROL_GROUPS = (
    _ControlGroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    _ControlGroup(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    ),
)


def available_memory_bytes() -> int:
    """Free memory of the machine, or of the container if its limit leaves less.

    Half of the machine's memory where Linux does not say what is free.
    """
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    of_machine = _numbers(_MEMINFO)["MemAvailable:"] * 1024
    return min(of_machine, *(_available_in(group, of_machine) for group in _CONTROL_GROUPS))


def _available_in(group: _ControlGroup, of_machine: int) -> int:
    """What a control group may still take; all if it is not there, or has no limit."""
    try:
        limit = (group.folder / group.limit).read_text().strip()
        used = int((group.folder / group.usage).read_text())
    except OSError:
        return of_machine
    if limit == "max":
        return of_machine
    # Cached files, such as weights just read, count as used but give way.
    stat = _numbers(group.folder / "memory.stat")
    cached = sum(stat[f"{group.stat_prefix}{kind}_file"] for kind in ("inactive", "active"))
    return max(0, int(limit) - used + cached)


def _numbers(file: Path) -> dict[str, int]:
    """The number of each line "name number ...", by its name."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
