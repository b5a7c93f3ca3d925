"""The server answers the rows of a batch, in any order and a limited number at a time."""

import asyncio
import json
import logging

import msgspec
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.batch.batch_runner import BatchRunner
from tests.paxkv.server.fake_engine import FAIL_AFTER_3, MODEL_NAME, NO_TOKENS, FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 60
MAX_BODY_BYTES = 1000


def line(custom_id, url, body):
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(fields).encode()


def run_lines(lines, *, engine=None, **settings):
    """Rows by custom_id, and the custom_ids in the order of the rows."""
    rows = []

    async def run():
        runner = BatchRunner(engine or FakeEngine(), ServerConfig(**settings))
        await runner.run(list(enumerate(lines, start=1)), rows.append)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    rows = [json.loads(msgspec.json.encode(row)) for row in rows]
    assert len(rows) == len(lines)
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(set(row) == {"id", "custom_id", "response", "error"} for row in rows)
    return {row["custom_id"]: row for row in rows}, [row["custom_id"] for row in rows]


def comparable(body):
    return {name: value for name, value in body.items() if name not in ("id", "created")}


MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = {
    "text": (TEXT, {"prompt": "ab", "max_tokens": 3, "model": MODEL_NAME}),
    "ids": (TEXT, {"prompt": [[97, 98], [99]], "n": 2, "max_tokens": 4, "logprobs": 2}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}),
}
BAD = {
    "other model": (TEXT, {"prompt": "a", "model": "other"}, 404),
    "no prompt": (TEXT, {"max_tokens": 3}, 400),
    "no object": (CHAT, [1], 400),
    "wrong type": (CHAT, {"messages": "hi"}, 400),
    "too hot": (CHAT, {"messages": MESSAGES, "temperature": -1}, 400),
    "too long": (TEXT, {"prompt": "a" * MAX_BODY_BYTES}, 413),
}


def test_good_rows_are_what_the_server_answers(shared_server):
    rows, _ = run_lines([line(name, *GOOD[name]) for name in GOOD])
    for name, (url, body) in GOOD.items():
        answer = shared_server.client.post(url, json=body)
        assert answer.status_code == 200
        response = rows[name]["response"]
        assert rows[name]["error"] is None
        assert (response["status_code"], set(response)) == (
            200,
            {"status_code", "request_id", "body"},
        )
        assert response["body"]["id"].endswith(response["request_id"])
        assert comparable(response["body"]) == comparable(answer.json())


def test_refused_body_is_an_error_row_with_what_the_server_says(start_server):
    server = start_server(max_body_bytes=MAX_BODY_BYTES)
    lines = [line(name, *BAD[name][:2]) for name in BAD]
    lines.append(line("text", *GOOD["text"]))
    rows, _ = run_lines(lines, max_body_bytes=MAX_BODY_BYTES)
    for name, (url, body, status) in BAD.items():
        answer = server.client.post(url, json=body)
        response = rows[name]["response"]
        assert (response["status_code"], response["body"]) == (status, None)
        assert response["request_id"].startswith("batch-")
        assert (answer.status_code, answer.json()) == (status, rows[name]["error"])
    assert rows["text"]["response"]["status_code"] == 200


def test_bad_line_is_an_error_row_and_the_rest_goes_on():
    rows, _ = run_lines([b"what?", line("x", "/v1/nothing", {}), line("text", *GOOD["text"])])
    for custom_id, param in ((None, None), ("x", "url")):
        row = rows[custom_id]
        assert (row["response"]["status_code"], row["response"]["body"]) == (400, None)
        assert row["error"]["error"]["type"] == "invalid_request_error"
        assert row["error"]["error"]["param"] == param
    assert rows["text"]["error"] is None


def test_bug_is_an_error_row_without_its_words_and_is_logged(caplog):
    body = {"prompt": FAIL_AFTER_3, "max_tokens": 5}
    rows, _ = run_lines([line("bug", TEXT, body), line("text", *GOOD["text"])])
    assert rows["bug"]["response"]["status_code"] == 500
    assert rows["bug"]["error"]["error"]["code"] == "internal_error"
    assert "a secret of the inside" in caplog.text
    assert "secret" not in json.dumps(rows["bug"])
    assert rows["text"]["error"] is None


def test_access_log_has_no_lines(caplog):
    caplog.set_level(logging.INFO)
    run_lines([line("text", *GOOD["text"])])
    assert not caplog.messages


def test_lines_are_read_when_they_can_start():
    engine, rows, most_ahead = FakeEngine(), [], 0

    def lines():
        nonlocal most_ahead
        for number in range(1, 101):
            most_ahead = max(most_ahead, number - len(rows))
            yield number, line(str(number), *GOOD["text"])

    asyncio.run(BatchRunner(engine, ServerConfig()).run(lines(), rows.append))
    assert len(rows) == 100
    assert 1 < most_ahead <= 2 * engine.model_info.max_num_seqs < 100


def test_rows_come_as_they_are_done():
    engine = FakeEngine(seconds_per_token=0.01)
    lengths = {"long": 40, "short": 1}
    lines = [line(k, TEXT, {"prompt": "a", "max_tokens": n}) for k, n in lengths.items()]
    assert run_lines(lines, engine=engine)[1] == ["short", "long"]


def test_the_number_of_lines_in_progress_is_bounded_and_fills_the_engine():
    engine = FakeEngine(seconds_per_token=0.001)
    lines = [line(str(i), TEXT, {"prompt": "a", "max_tokens": 2}) for i in range(100)]
    assert len(run_lines(lines, engine=engine)[0]) == 100
    assert engine.model_info.max_num_seqs < engine.most_running <= 16


def test_empty_batch_has_no_rows():
    assert run_lines([]) == ({}, [])


def test_lines_wait_while_another_engine_starts():
    engine = FakeEngine()
    engine.is_alive = False

    async def run():
        rows = []
        lines = [(1, line("text", *GOOD["text"]))]
        running = asyncio.ensure_future(BatchRunner(engine, ServerConfig()).run(lines, rows.append))
        await asyncio.sleep(0.05)
        assert not rows
        engine.is_alive = True
        await asyncio.wait_for(running, TIMEOUT_S)
        return rows

    (row,) = asyncio.run(run())
    assert row.error is None


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "row not written"])
def test_requests_are_aborted_if_a_batch_ends_early(is_cancelled):
    engine = FakeEngine()

    def fail(row):
        raise OSError(28, "the disk is full")

    async def run():
        held = line("held", TEXT, {"prompt": NO_TOKENS, "max_tokens": 3})
        lines = [(1, held), (2, line("text", *GOOD["text"]))]
        rows = []
        write = rows.append if is_cancelled else fail
        running = asyncio.ensure_future(BatchRunner(engine, ServerConfig()).run(lines, write))
        # With one line answered, only the held one runs.
        while not rows and not running.done():
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else OSError):
            await running

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert not engine.running
    assert engine.most_running and len(engine.aborted) == 1
