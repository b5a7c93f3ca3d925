"""`python -m paxkv.entrypoints.trace_frames FILE`: converts a trace to frames, one JSON line each.

The server runs this for traces that a page uploads. It is a process with limits on memory and time,
because a trace is untrusted input that decides how much the scheduler computes.
"""

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.errors import PaxkvError
from paxkv.inspector.trace_frames import frame_lines

MAX_MEMORY_BYTES = 8 * 2**30
MAX_CPU_S = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the frames to stdout; returns the exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m paxkv.entrypoints.trace_frames",
        description="Replays a trace and writes the inspector's frames, one JSON line each.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="trace to replay")
    namespace = parser.parse_args(arguments)
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, MAX_CPU_S)
    out = sys.stdout.buffer
    try:
        for line in frame_lines(namespace.file, make_scheduler):
            out.write(line + b"\n")
    except PaxkvError as error:
        # The sender of the trace does not know the name of this temporary file.
        message = str(error).replace(str(namespace.file), "the file")
        out.write(msgspec.json.encode({"error": message}) + b"\n")
        return 2
    finally:
        out.flush()
    return 0


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
