"""Requests are sent when they arrive or when a client is free; records hold what happened."""

import asyncio
import math

import pytest

from benchmarks.serve.completions_client import CompletionsClient
from benchmarks.serve.load import poisson_arrivals, send_load
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord
from tests.benchmarks.serve.fake_server import END, FakeServer, piece


def send(arrivals: list[float], limit: int | None = None) -> list[RequestRecord]:
    """Sends requests of 6 tokens."""
    inputs = [RequestInput(prompt=[9, 9, i], max_tokens=6) for i in range(len(arrivals))]

    async def run() -> list[RequestRecord]:
        async with CompletionsClient("http://fake/v1", api_key=None, timeout_s=60) as client:
            return await send_load(client, inputs, {}, arrivals=arrivals, max_concurrency=limit)

    return asyncio.run(run())


def usage(num_output_tokens: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_output_tokens}}


@pytest.mark.parametrize(
    ("events", "words", "num_tokens", "counted_by"),
    [
        ([piece("ab"), piece("c"), END, usage(6)], [], 6, "usage"),
        # Without usage, pieces are counted. U+2028 is not the end of a line.
        ([piece("a\u2028b"), piece("c"), END], [], 2, "chunks"),
        ([piece("a"), {"error": "it died"}], ["error in the stream", "it died"], 1, "chunks"),
        ([piece("a"), piece("b")], ["ended before"], 2, "chunks"),
        ([END, usage(0)], ["no piece", "--extra-body"], 0, "usage"),
        ([], ["HTTP 503", "too much"], 0, "chunks"),
    ],
)
def test_record_holds_tokens_and_failure(
    events, words, num_tokens, counted_by, monkeypatch
) -> None:
    FakeServer(monkeypatch, events=events, status=200 if events else 503)
    (record,) = send([0.0])
    assert (record.error is None) == (not words)
    assert [word for word in words if word not in record.error] == []
    assert (record.num_output_tokens, record.counted_by) == (num_tokens, counted_by)
    if not words:
        assert record.text.replace("\u2028", "") == "abc" and len(record.chunk_times_s) == 2


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, 50.0, seed=3)
    assert arrivals[0] == 0.0
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # Mean and standard deviation of an exponential distribution are both 1 / rate.
    assert mean == pytest.approx(0.02, rel=0.05) and spread == pytest.approx(0.02, rel=0.05)
    assert poisson_arrivals(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


def test_open_loop_does_not_wait_for_answers(monkeypatch) -> None:
    arrivals = [0.0, 0.03, 0.06, 0.09, 0.12]
    # The server answers no request before all have arrived.
    fake = FakeServer(monkeypatch, num_awaited=5)
    records = send(arrivals)
    assert fake.most_running == 5
    assert [(record.error, record.due_s) for record in records] == [(None, s) for s in arrivals]
    assert all(record.sent_s >= record.due_s for record in records)


def test_closed_loop_keeps_its_number_of_clients_busy(monkeypatch) -> None:
    fake = FakeServer(monkeypatch, gap_s=0.01, num_awaited=3)
    records = send([0.0] * 9, limit=3)
    assert (fake.most_running, fake.num_requests) == (3, 9)
    # The fourth request is sent when one of the first three is answered.
    sent_s = sorted(record.sent_s for record in records)
    assert sent_s[3] >= min(record.end_s for record in records)
