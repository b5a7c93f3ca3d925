"""Replays a recorded trace and makes inspector frames of it, one JSON line per frame."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.observation import InspectorFrame
from paxkv.errors import TraceFileError
from paxkv.inspector.frame_maker import FrameMaker
from paxkv.trace.calls import AddRequestCall, Call, ScheduleCall, UpdateCall
from paxkv.trace.recorder import SchedulerFactory
from paxkv.trace.replayer import ReplaySummary, TracePlayer, replay_call
from paxkv.trace.trace_file import TraceReader

# The page keeps all frames. A frame of a longer trace covers several steps.
MAX_FRAMES = 3000
MAX_OUTPUT_BYTES = 256 * 2**20
MAX_BLOCKS = 2_000_000


class TraceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the last line.

    Args:
        num_lines: Lines of the trace that were replayed.
        note: Why the trace is not shown in full, if it is not.
    """

    num_steps: int
    num_requests: int
    num_preemptions: int
    num_lines: int
    note: str | None


def frame_lines(file: Path, make_scheduler: SchedulerFactory) -> Iterator[bytes]:
    """Yields a `{"frame": InspectorFrame}` per line, and finally `{"end": TraceEnd}`.

    Args:
        make_scheduler: Builds the scheduler that replays the trace.

    Raises:
        TraceFileError: The file is not a readable trace, or its pool is too large.
    """
    reader = TraceReader.open(file)
    num_blocks = reader.header.kv_cache_config.num_blocks
    if num_blocks > MAX_BLOCKS:
        raise TraceFileError(f"the trace has {num_blocks} blocks; at most {MAX_BLOCKS} are shown.")
    frames = _TraceFrames(TracePlayer(reader.header, make_scheduler))
    lines_per_frame = -(-_count_lines(file) // MAX_FRAMES)
    num_bytes = num_lines = 0
    note: str | None = None
    yield _frame_line(frames.make_frame())
    for line in reader.lines():
        num_lines += 1
        for call in line.calls:
            frames.play(call)
        is_over = frames.summary.difference is not None or num_bytes > MAX_OUTPUT_BYTES
        if num_lines % lines_per_frame == 0 or is_over:
            data = _frame_line(frames.make_frame())
            num_bytes += len(data)
            yield data
        if is_over:
            break
    if num_lines % lines_per_frame:
        yield _frame_line(frames.make_frame())
    summary = frames.summary
    if summary.difference is not None:
        note = (
            "the replay stops here, because it differs from the recording "
            f"({summary.difference_at}, {summary.difference.path}). Another version of paxkv may "
            "have recorded the trace."
        )
    elif num_bytes > MAX_OUTPUT_BYTES:
        note = f"the trace is too long to show in full; only the first {num_lines} steps are shown."
    elif reader.cut_off_line is not None:
        note = f"line {reader.cut_off_line} is cut off: the recording process ended there."
    end = TraceEnd(
        num_steps=summary.num_steps,
        num_requests=summary.num_requests,
        num_preemptions=summary.num_preemptions,
        num_lines=num_lines,
        note=note,
    )
    yield msgspec.json.encode({"end": end})


class _TraceFrames:
    """Replays calls, and reports arrivals and steps to the frame maker's meter."""

    def __init__(self, player: TracePlayer) -> None:
        self._player = player
        self._maker = FrameMaker(player.scheduler)
        self.summary = ReplaySummary()
        self._is_first = True
        self._at_s = 0.0
        # Of the current step: the seconds of host work, and the start time.
        self._host_s = 0.0
        self._step_start_s: float | None = None

    def play(self, call: Call) -> None:
        if self.summary.difference is not None:
            return
        replay_call(self._player, call, self.summary)
        self._at_s = max(self._at_s, call.at_s + call.took_s)
        self._host_s += call.took_s
        match call:
            case AddRequestCall(error=None):
                request = call.engine_request()
                self._maker.meter.on_arrival(request.request_id, call.at_s)
            case ScheduleCall():
                if self._step_start_s is None:
                    self._step_start_s = call.at_s
            case UpdateCall():
                start_s = call.at_s if self._step_start_s is None else self._step_start_s
                took_s = max(self._at_s - start_s, self._host_s)
                self._maker.meter.on_step(
                    _core_outputs(call),
                    took_s=took_s,
                    wait_s=took_s - self._host_s,
                    now_s=self._at_s,
                )
                # The next step may have been scheduled before this one ended; its time starts now.
                self._step_start_s, self._host_s = self._at_s, 0.0

    def make_frame(self) -> InspectorFrame:
        make = self._maker.make_snapshot if self._is_first else self._maker.make_delta
        self._is_first = False
        return make(self._at_s)


def _core_outputs(call: UpdateCall) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(request_id=row.req_id, new_token_ids=row.new_token_ids)
        for row in call.outputs
    ]


def _frame_line(frame: InspectorFrame) -> bytes:
    return msgspec.json.encode({"frame": frame})


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return max(sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(2**20), b"")), 1)
