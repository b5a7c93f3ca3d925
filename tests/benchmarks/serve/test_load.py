"""Requests are sent when they arrive or when a client is free; records hold what happened."""

import asyncio
import math

import pytest

from benchmarks.serve.completions_client import CompletionsClient
from benchmarks.serve.load import poisson_arrivals, send_load
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord
from tests.benchmarks.serve.fake_completions_server import (
    CUT_OFF,
    FAIL_MIDWAY,
    LINE_SEPARATOR,
    REFUSE,
    SAY_NOTHING,
    FakeCompletionsServer,
    running_fake_server,
)


def send(
    fake: FakeCompletionsServer, arrivals: list[float], limit: int | None = None, order: int = 9
) -> list[RequestRecord]:
    """Sends requests of 6 tokens; `order` tells the server to fail."""
    inputs = [RequestInput(prompt=[order, 9, i], max_tokens=6) for i in range(len(arrivals))]

    async def run() -> list[RequestRecord]:
        async with CompletionsClient(fake.url, api_key=None, timeout_s=60) as client:
            return await send_load(client, inputs, {}, arrivals=arrivals, max_concurrency=limit)

    return asyncio.run(run())


def test_tokens_come_from_usage_or_else_pieces_are_counted() -> None:
    for settings, num_chunks, counted_by, num_prompt_tokens in (
        ({"tokens_per_piece": 2}, 3, "usage", 3),
        ({"sends_usage": False}, 6, "chunks", None),
    ):
        with running_fake_server(**settings) as fake:
            (record,) = send(fake, [0.0])
        assert (record.num_output_tokens, record.counted_by) == (6, counted_by)
        assert (record.text, record.num_prompt_tokens) == ("a" * num_chunks, num_prompt_tokens)
        assert len(record.chunk_times_s) == num_chunks


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (LINE_SEPARATOR, []),
        (REFUSE, ["HTTP 503", "too much"]),
        (FAIL_MIDWAY, ["in the stream", "the engine died"]),
        (CUT_OFF, ["ended before"]),
        (SAY_NOTHING, ["no piece", "--extra-body"]),
    ],
)
def test_failure_says_what_happened(order: int, words: list[str]) -> None:
    with running_fake_server() as fake:
        (record,) = send(fake, [0.0], order=order)
    assert (record.error is None) == (not words)
    assert [word for word in words if word not in record.error] == []


def test_arrivals_are_those_of_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, 50.0, seed=3)
    assert arrivals[0] == 0.0
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # Mean and standard deviation of an exponential distribution are both 1 / rate.
    assert mean == pytest.approx(0.02, rel=0.05) and spread == pytest.approx(0.02, rel=0.05)
    assert arrivals == poisson_arrivals(20_000, 50.0, seed=3)
    assert poisson_arrivals(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


def test_open_loop_does_not_wait_for_answers() -> None:
    arrivals = [0.0, 0.03, 0.06, 0.09, 0.12]
    # The server answers no request before all have arrived.
    with running_fake_server(num_awaited=5) as fake:
        records = send(fake, arrivals)
    assert fake.most_running == 5
    assert [(record.error, record.due_s) for record in records] == [(None, s) for s in arrivals]
    assert all(record.sent_s >= record.due_s for record in records)


def test_closed_loop_keeps_its_number_of_clients_busy() -> None:
    with running_fake_server(first_delay_s=0.1, num_awaited=3) as fake:
        records = send(fake, [0.0] * 9, limit=3)
    assert (fake.most_running, len(fake.bodies)) == (3, 9)
    # The fourth request is sent when one of the first three is answered.
    sent_s = sorted(record.sent_s for record in records)
    assert sent_s[3] >= min(record.end_s for record in records)
