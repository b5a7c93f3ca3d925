"""The processor that this process runs on: its name, instruction sets and cores."""

import functools
import hashlib
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_identity() -> str:
    """Name and instruction sets: machine code for one processor may not run on another."""
    if not _CPUINFO.is_file():
        return f"{platform.machine()} {platform.processor()}"
    fields = _first_processor()
    name = fields.get("model name") or platform.machine()
    digest = hashlib.sha256(repr(sorted(instruction_sets())).encode()).hexdigest()
    return f"{name}, instruction sets {digest[:8]}"


def instruction_sets() -> frozenset[str]:
    """As Linux names them, such as "avx2"; empty if Linux does not name any."""
    # x86 calls them "flags", ARM "Features".
    fields = _first_processor()
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def num_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Threads that XLA computes with on the CPU: one per core, or fewer if NPROC says so."""
    wanted = os.environ.get("NPROC", "")
    return min(num_cores(), int(wanted)) if wanted.isdecimal() and int(wanted) else num_cores()


@functools.cache
def _first_processor() -> dict[str, str]:
    if not _CPUINFO.is_file():
        return {}
    lines = _CPUINFO.read_text().partition("\n\n")[0].splitlines()
    fields = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in fields}
