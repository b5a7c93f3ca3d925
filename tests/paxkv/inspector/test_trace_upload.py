"""Uploaded traces are replayed in another process, within limits, one at a time."""

import asyncio

import msgspec
import pytest

from paxkv.inspector.trace_upload import (
    TraceBusyError,
    TraceTooLargeError,
    TraceUploads,
    UnreadableTraceError,
)
from tests.paxkv.inspector.recorded_trace import record


async def chunks(data, size=1000):
    for start in range(0, len(data), size):
        yield data[start : start + size]


def test_upload_returns_frames_and_a_second_upload_is_rejected(tmp_path):
    record(tmp_path / "trace")
    data = (tmp_path / "trace").read_bytes()

    async def scenario():
        uploads = TraceUploads(len(data))
        lines = await uploads.start(chunks(data))
        with pytest.raises(TraceBusyError):
            await uploads.start(chunks(data))
        got = [msgspec.json.decode(line) async for line in lines]
        assert "frame" in got[0] and got[-1]["end"]["num_requests"] == 6
        # Closing the reader ends the replay, so another upload is accepted.
        lines = await uploads.start(chunks(data))
        await anext(lines)
        await lines.aclose()
        with pytest.raises(UnreadableTraceError, match="not the header"):
            await uploads.start(chunks(b"junk\n"))
        # The unreadable upload has ended too, so the next one is rejected only for its size.
        with pytest.raises(TraceTooLargeError, match="--inspector-max-trace-bytes"):
            await uploads.start(chunks(data + b"x"))

    asyncio.run(scenario())
