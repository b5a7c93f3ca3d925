"""One streamed completion: times are the server's, failures are told, texts split no event."""

import asyncio

import pytest

from benchmarks.serve.completions_client import CompletionsClient
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord
from tests.benchmarks.serve.fake_completions_server import (
    CUT_OFF,
    FAIL_MIDWAY,
    LINE_SEPARATOR,
    MODEL,
    REFUSE,
    SAY_NOTHING,
    FakeCompletionsServer,
    running_fake_server,
)


def complete(fake: FakeCompletionsServer, first_token: int, max_tokens: int = 4) -> RequestRecord:
    async def run() -> RequestRecord:
        async with CompletionsClient(fake.url, api_key="secret", timeout_s=60) as client:
            request = RequestInput(prompt=[first_token, 9, 9], max_tokens=max_tokens)
            return await client.complete(request, {"model": MODEL}, start=0.0, due_s=0.0)

    return asyncio.run(run())


def test_tokens_come_from_usage_where_pieces_hold_several() -> None:
    with running_fake_server(tokens_per_piece=2) as fake:
        record = complete(fake, 9, max_tokens=6)
    assert (record.num_output_tokens, record.counted_by) == (6, "usage")
    assert (record.num_prompt_tokens, len(record.chunk_times_s)) == (3, 3)


def test_without_usage_pieces_are_counted() -> None:
    with running_fake_server(sends_usage=False) as fake:
        record = complete(fake, 9, max_tokens=6)
    assert (record.num_output_tokens, record.counted_by) == (6, "chunks")
    assert record.num_prompt_tokens is None


def test_no_character_of_a_text_ends_an_event() -> None:
    with running_fake_server() as fake:
        record = complete(fake, LINE_SEPARATOR)
    assert (record.error, len(record.chunk_times_s)) == (None, 4)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (REFUSE, ["HTTP 503", "too much"]),
        (FAIL_MIDWAY, ["in the stream", "the engine died"]),
        (CUT_OFF, ["ended before"]),
        (SAY_NOTHING, ["no piece", "--extra-body"]),
    ],
)
def test_failure_says_what_happened(order: int, words: list[str]) -> None:
    with running_fake_server() as fake:
        record = complete(fake, order)
    assert [word for word in words if word not in record.error] == []
