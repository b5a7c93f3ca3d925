"""Sends requests in an open loop (at arrival times) or a closed loop (a number of clients)."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Mapping, Sequence

from benchmarks.serve.completions_client import CompletionsClient, ServerError
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord


def poisson_arrivals(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Random arrival times in seconds, independent of each other, `request_rate` per second.

    The first request arrives at 0; with an infinite rate, all do.
    """
    if request_rate == math.inf:
        return [0.0] * num_requests
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        arrivals.append(now)
        now += rng.expovariate(request_rate)
    return arrivals


async def send_load(
    client: CompletionsClient,
    inputs: Sequence[RequestInput],
    fields: Mapping[str, object],
    *,
    arrivals: Sequence[float],
    max_concurrency: int | None,
) -> list[RequestRecord]:
    """Sends each request when it arrives; returns the records in the order of `inputs`.

    Args:
        fields: Fields of every request's body.
        arrivals: Seconds after the start, one per request.
        max_concurrency: Most requests that run at once; other requests wait in order of arrival.
            None is no limit.
    """
    slots = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    start = time.perf_counter()

    async def send(request: RequestInput, due_s: float) -> RequestRecord:
        await asyncio.sleep(start + due_s - time.perf_counter())
        async with slots:
            return await client.complete(request, fields, start=start, due_s=due_s)

    return await asyncio.gather(*map(send, inputs, arrivals))


async def warm_up(
    client: CompletionsClient, inputs: Sequence[RequestInput], fields: Mapping[str, object]
) -> None:
    """Sends requests one after another.

    Raises:
        ServerError: A request failed, so the load would fail too.
    """
    for request in inputs:
        start = time.perf_counter()
        record = await client.complete(request, fields, start=start, due_s=0.0)
        if record.error is not None:
            raise ServerError(f"a warm-up request failed: {record.error}")
