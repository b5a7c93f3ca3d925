"""How much of the host's memory this process can still take."""

import os
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")


class _ControlGroup(NamedTuple):
    """Where a version of Linux' control groups has its files.

    Args:
        controllers: The name in /proc/self/cgroup, which the path of the process follows.
        limits: Files that each may hold a limit.
        stat_prefix: The prefix of lines of memory.stat that include the groups below it.
    """

    folder: Path
    controllers: str
    limits: tuple[str, ...]
    usage: str
    stat_prefix: str


_CONTROL_GROUPS = (
    _ControlGroup(Path("/sys/fs/cgroup"), "", ("memory.max", "memory.high"), "memory.current", ""),
    _ControlGroup(
        Path("/sys/fs/cgroup/memory"),
        "memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_",
    ),
)


def available_memory_bytes() -> int:
    """Free memory of the machine, or of the container if its limit leaves less.

    Half of the machine's memory if Linux does not say what is free.
    """
    meminfo = _numbers(_MEMINFO)
    if "MemAvailable:" not in meminfo:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    of_machine = meminfo["MemAvailable:"] * 1024
    folders = ((group, folder) for group in _CONTROL_GROUPS for folder in _folders(group))
    return min(of_machine, *(_available_in(group, folder, of_machine) for group, folder in folders))


def free_swap_bytes() -> int:
    """Free space for pages that are swapped out; 0 if Linux does not say it."""
    return _numbers(_MEMINFO).get("SwapFree:", 0) * 1024


def _folders(group: _ControlGroup) -> list[Path]:
    """The group of this process and all groups around it: each may have a limit.

    A container often sees its own group as the root, whatever /proc/self/cgroup says.
    """
    own = "/"
    if _OWN_GROUPS.is_file():
        # As in 4:memory:/user.slice/a.service, and in 0::/user.slice/a.service for version 2.
        lines = (line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines())
        paths = (line[2] for line in lines if group.controllers in line[1].split(","))
        own = next(paths, own)
    path = group.folder / own.lstrip("/")
    return [path, *path.parents[: len(path.relative_to(group.folder).parts)]]


def _available_in(group: _ControlGroup, folder: Path, of_machine: int) -> int:
    """Memory that a control group may still take; all if it does not exist or has no limit."""
    usage = _word(folder / group.usage)
    limits = [_word(folder / name) for name in group.limits]
    found = [int(limit) for limit in limits if limit.isdecimal()]
    if not found or not usage.isdecimal():
        return of_machine
    # Cached files, such as weights just read, count as used, but Linux drops them if needed.
    stat = _numbers(folder / "memory.stat")
    cached = sum(stat.get(f"{group.stat_prefix}{kind}_file", 0) for kind in ("inactive", "active"))
    return max(0, min(found) - int(usage) + cached)


def _word(file: Path) -> str:
    """The content of a small file; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """The number of each line "name number ...", by its name."""
    lines = (line.split() for line in _word(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
