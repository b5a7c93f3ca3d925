"""`python -m paxkv.replay`: replays a recorded trace without a device and compares the results."""

from paxkv.entrypoints.command_end import end_by_signals, run_command

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.errors import TraceFileError
from paxkv.trace.chrome_view import write_chrome_view
from paxkv.trace.replayer import ReplaySummary, replay
from paxkv.trace.trace_file import TraceReader

EXACT, DIFFERENT, UNREADABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays a trace; returns the exit code of the process."""
    namespace = make_parser().parse_args(arguments)
    try:
        reader = TraceReader.open(namespace.file)
        if namespace.perfetto is not None:
            num_events = write_chrome_view(reader, namespace.perfetto)
            print(f"{namespace.perfetto}: {num_events} events; open it in ui.perfetto.dev")
        start_s = time.perf_counter()
        summary = replay(reader, make_scheduler)
        print(_report(summary, reader, time.perf_counter() - start_s))
    except TraceFileError as error:
        print("paxkv: error:", error, file=sys.stderr)
        return UNREADABLE
    return EXACT if summary.difference is None else DIFFERENT


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paxkv.replay",
        description="Replays a trace that --trace-file recorded, and compares every decision, "
        "block and token. Exit code 0: all are equal. 1: something differs; the first difference "
        "is printed. 2: the file is not a trace that this version can read.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="trace to replay")
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="OUT.json",
        help="also write the trace as Chrome trace events, for ui.perfetto.dev or chrome://tracing",
    )
    return parser


def _report(summary: ReplaySummary, reader: TraceReader, replay_s: float) -> str:
    lines = [
        f"{summary.num_steps} steps, {summary.num_requests} requests, "
        f"{summary.num_preemptions} preemptions, {summary.num_scheduled_tokens} tokens computed, "
        f"{summary.num_hit_tokens} prompt tokens shared, {summary.num_output_tokens} tokens out; "
        f"replayed in {replay_s:.2f} s"
    ]
    if summary.num_draft_tokens:
        lines.append(
            f"{summary.num_draft_tokens} drafts verified, {summary.num_accepted_tokens} accepted"
        )
    if reader.cut_off_line is not None:
        lines.append(
            f"line {reader.cut_off_line} is cut off, because the recording process ended while it "
            "wrote the line. The lines before it were replayed."
        )
    if summary.failure is not None:
        lines.append(f"the scheduler raised: {summary.failure}")
    difference = summary.difference
    if difference is None:
        lines.append("exact: every decision, block and token equals the recorded one")
    else:
        lines += [
            f"first difference: {summary.difference_at}, field {difference.path}",
            f"  got      {difference.got!r}",
            f"  recorded {difference.recorded!r}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
