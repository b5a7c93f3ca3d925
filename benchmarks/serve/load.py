"""Sends requests as an arrival process or a number of clients would: open loop, closed loop."""

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
    """Seconds at which requests arrive: independent of each other, `request_rate` a second.

    The first comes at once; an infinite rate is all at once.
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
    """Sends each request when it arrives; returns a record of every one, in their order.

    Args:
        fields: Of every request's body.
        arrivals: Seconds after the start, one a request.
        max_concurrency: Most requests at once: one that arrives beyond that waits here, first come
            first served. None is no limit.
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
    """Sends requests one after the other.

    Raises:
        ServerError: One failed: then the rest of them would, too.
    """
    for request in inputs:
        start = time.perf_counter()
        record = await client.complete(request, fields, start=start, due_s=0.0)
        if record.error is not None:
            raise ServerError(f"a warm-up request failed: {record.error}")
