"""The light client sees what the full one does, on one connection; failures are told."""

import asyncio
import time

from benchmarks.serve.light_client import LightClient
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord
from tests.benchmarks.serve.fake_completions_server import (
    CUT_OFF,
    FAIL_MIDWAY,
    LINE_SEPARATOR,
    REFUSE,
    running_fake_server,
)


def ask(orders: list[int], **settings: object) -> list[RequestRecord]:
    """One request after the other, on one client."""
    with running_fake_server(is_chunked=True, **settings) as fake:

        async def run() -> list[RequestRecord]:
            start = time.perf_counter()
            async with LightClient(fake.url.removesuffix("/v1"), timeout_s=60) as client:
                return [
                    await client.complete(
                        RequestInput(prompt=[order, 9], max_tokens=4), {}, start=start
                    )
                    for order in orders
                ]

        return asyncio.run(run())


def test_text_usage_and_times_of_several_requests() -> None:
    for record in ask([9, LINE_SEPARATOR, 9], gap_s=0.02):
        assert record.error is None
        assert record.text in ("aaaa", "a\u2028b" * 4)
        assert (record.num_output_tokens, record.num_prompt_tokens) == (4, 2)
        assert len(record.chunk_times_s) == 4
        # Pieces that are read late may come together, but not before they are sent.
        assert min(record.itls_s) >= 0 and record.e2e_s >= 3 * 0.02


def test_failures_are_told_and_the_next_request_is_served() -> None:
    refused, failed, cut_off, served = ask([REFUSE, FAIL_MIDWAY, CUT_OFF, 9])
    assert "503" in refused.error
    assert "the engine died" in failed.error
    assert cut_off.error is not None
    assert served.error is None and served.text == "aaaa"
