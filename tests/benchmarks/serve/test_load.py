"""Requests leave when they arrive, whatever the server does, or when a client is free."""

import asyncio
import math

import pytest

from benchmarks.serve.completions_client import CompletionsClient
from benchmarks.serve.load import poisson_arrivals, send_load
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord
from tests.benchmarks.serve.fake_completions_server import (
    MODEL,
    FakeCompletionsServer,
    running_fake_server,
)

FIELDS = {"model": MODEL}


def send(
    fake: FakeCompletionsServer, arrivals: list[float], max_concurrency: int | None = None
) -> list[RequestRecord]:
    inputs = [RequestInput(prompt=[9, i], max_tokens=2) for i in range(len(arrivals))]

    async def run() -> list[RequestRecord]:
        async with CompletionsClient(fake.url, api_key=None, timeout_s=60) as client:
            return await send_load(
                client, inputs, FIELDS, arrivals=arrivals, max_concurrency=max_concurrency
            )

    return asyncio.run(run())


def test_arrivals_are_those_of_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, 50.0, seed=3)
    assert arrivals[0] == 0.0
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # Of an exponential distribution both are 1 / rate.
    assert mean == pytest.approx(0.02, rel=0.05) and spread == pytest.approx(0.02, rel=0.05)
    assert arrivals == poisson_arrivals(20_000, 50.0, seed=3)
    assert arrivals != poisson_arrivals(20_000, 50.0, seed=4)
    assert poisson_arrivals(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


def test_open_loop_does_not_wait_for_answers() -> None:
    arrivals = [0.0, 0.03, 0.06, 0.09, 0.12]
    with running_fake_server(num_awaited=5) as fake:
        records = send(fake, arrivals)
    # All were there before the first answer was, though not before they arrived.
    assert fake.most_running == 5
    assert [record.error for record in records] == [None] * 5
    assert [record.due_s for record in records] == arrivals
    assert all(record.sent_s >= record.due_s for record in records)


def test_closed_loop_keeps_its_number_of_clients_busy() -> None:
    with running_fake_server(first_delay_s=0.1, num_awaited=3) as fake:
        records = send(fake, [0.0] * 9, max_concurrency=3)
    assert fake.most_running == 3
    assert len(fake.bodies) == 9
    # The fourth is sent when one of the first three is answered.
    sent_s = sorted(record.sent_s for record in records)
    assert sent_s[3] >= min(record.end_s for record in records)
    assert [record.error for record in records] == [None] * 9
