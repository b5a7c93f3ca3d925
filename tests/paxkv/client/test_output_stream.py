"""A slow reader receives all waiting outputs merged and in order."""

import asyncio
import dataclasses

import pytest

from paxkv.client import output_stream
from paxkv.client.output_stream import OutputStream
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.errors import EngineDeadError, SlowReaderError


def delta(*tokens: tuple[int, str], end: str | None = None, **more: object) -> RequestOutput:
    """One new token of some completions: ((index, text), ...)."""
    outputs = [
        CompletionOutput(
            index=index,
            text=text,
            token_ids=[ord(text)],
            cumulative_logprob=-float(ord(text)),
            logprobs=[{ord(text): Logprob(logprob=-1.0, rank=1, decoded_token=text)}],
            finish_reason=end,
        )
        for index, text in tokens
    ]
    named = {"request_id": "r", "prompt": "p", "prompt_token_ids": [1], "finished": end is not None}
    return RequestOutput(outputs=outputs, **named, **more)


def taken(*items: RequestOutput | EngineDeadError) -> RequestOutput:
    stream = OutputStream("r", engine_request_id="r-0")
    for item in items:
        stream.fail(item) if isinstance(item, EngineDeadError) else stream.put(item)
    return asyncio.run(stream.next_output())


def test_single_output_is_returned_unchanged() -> None:
    output = delta((0, "a"))
    assert taken(output) is output


def test_waiting_deltas_are_merged() -> None:
    scores = [None, {5: Logprob(logprob=-2.0, rank=1, decoded_token="x")}]
    merged = taken(
        delta((0, "a"), prompt_logprobs=scores), delta((0, "b")), delta((0, "c"), end="stop")
    )
    (completion,) = merged.outputs
    assert (completion.text, completion.token_ids) == ("abc", [97, 98, 99])
    assert [list(position) for position in completion.logprobs] == [[97], [98], [99]]
    assert completion.cumulative_logprob == -99.0
    assert completion.finish_reason == "stop" and merged.finished
    assert merged.prompt_logprobs == scores


def test_deltas_of_different_completions_are_not_mixed() -> None:
    merged = taken(delta((2, "x")), delta((0, "a"), (2, "y")), delta((1, "k")))
    assert [(c.index, c.text) for c in merged.outputs] == [(0, "a"), (1, "k"), (2, "xy")]
    assert not merged.finished


def test_end_without_a_token_keeps_earlier_logprobs() -> None:
    end = delta(end="abort")
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")
    (merged,) = taken(delta((0, "a")), dataclasses.replace(end, outputs=[completion])).outputs
    assert [list(position) for position in merged.logprobs] == [[97]]
    assert merged.finish_reason == "abort"


def test_waiting_outputs_are_returned_before_the_error() -> None:
    async def run() -> None:
        stream = OutputStream("r", engine_request_id="r-0")
        stream.put(delta((0, "a")))
        stream.put(delta((0, "b")))
        stream.fail(EngineDeadError("the engine has ended"))
        assert (await stream.next_output()).outputs[0].text == "ab"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="has ended"):
                await stream.next_output()

    asyncio.run(run())
    with pytest.raises(EngineDeadError):
        taken(EngineDeadError("it was never alive"))


def test_outputs_of_different_requests_are_not_merged() -> None:
    """A beam search has several requests at the same time, each with one output."""

    async def run() -> None:
        stream = OutputStream("r", engine_request_id="r-0")
        for request_id in ("a", "b"):
            stream.put(dataclasses.replace(delta((0, "x")), request_id=request_id))
        assert [(await stream.next_output()).request_id for _ in range(2)] == ["a", "b"]

    asyncio.run(run())


def test_merged_pieces_have_a_bounded_size(monkeypatch) -> None:
    monkeypatch.setattr(output_stream, "_MAX_PIECE_BYTES", 300)

    async def run() -> list[str]:
        stream = OutputStream("r", engine_request_id="r-0")
        letters = [chr(ord("a") + number % 26) for number in range(100)]
        for letter in letters:
            stream.put(delta((0, letter)))
        texts = []
        while "".join(texts) != "".join(letters):
            texts.append((await stream.next_output()).outputs[0].text)
        return texts

    texts = asyncio.run(run())
    assert 5 < len(texts) < 50


def test_reader_with_many_waiting_pieces_yields_to_the_loop(monkeypatch) -> None:
    monkeypatch.setattr(output_stream, "_MAX_PIECE_BYTES", 100)

    async def run() -> tuple[int, int]:
        stream = OutputStream("r", engine_request_id="r-0")
        for _ in range(99):
            stream.put(delta((0, "a")))
        stream.put(delta((0, "b"), end="stop"))

        async def read() -> int:
            num_pieces = 1
            while not (await stream.next_output()).finished:
                num_pieces += 1
            return num_pieces

        reader, num_turns = asyncio.ensure_future(read()), 0
        while not reader.done():
            await asyncio.sleep(0)
            num_turns += 1
        return reader.result(), num_turns

    num_pieces, num_turns = asyncio.run(run())
    assert num_turns >= num_pieces > 10


def test_single_waiting_output_may_have_any_size(monkeypatch) -> None:
    monkeypatch.setattr(output_stream, "MAX_WAITING_BYTES", 2000)
    monkeypatch.setattr(output_stream, "_MAX_PIECE_BYTES", 500)
    stream = OutputStream("r", engine_request_id="r-0")
    stream.put(delta((0, "a")))
    stream.put(delta(*((index, "b") for index in range(200))))
    assert stream.num_waiting_bytes > 2000 and not stream.is_over_limit
    stream.put(delta((0, "c")))
    assert stream.is_over_limit


def test_stream_over_its_limit_drops_waiting_outputs(monkeypatch) -> None:
    monkeypatch.setattr(output_stream, "MAX_WAITING_BYTES", 2000)
    monkeypatch.setattr(output_stream, "_MAX_PIECE_BYTES", 500)

    async def run() -> None:
        stream = OutputStream("r", engine_request_id="r-0")
        # A single output may have any size, and a reader that keeps up has no limit.
        stream.put(delta((0, "a")))
        for _ in range(200):
            stream.put(delta((0, "b")))
            assert not stream.is_over_limit
            await stream.next_output()
        num_put = 0
        while not stream.is_over_limit and num_put < 1000:
            stream.put(delta((0, "c")))
            num_put += 1
        assert 10 < num_put < 200
        stream.drop(SlowReaderError("too slow"))
        assert not stream.is_over_limit
        with pytest.raises(SlowReaderError):
            await stream.next_output()

    asyncio.run(run())
