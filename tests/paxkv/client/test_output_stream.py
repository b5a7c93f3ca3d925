"""Whoever is behind gets what waits in one piece, in order, and nothing of it is lost."""

import asyncio
import dataclasses

import pytest

from paxkv.client.output_stream import OutputStream
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.errors import EngineDeadError


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
        stream.queue.put_nowait(item)
    return asyncio.run(stream.take_all())


def test_one_output_is_left_as_it_is() -> None:
    output = delta((0, "a"))
    assert taken(output) is output


def test_what_waits_becomes_one_piece() -> None:
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


def test_completions_of_one_prompt_stay_apart() -> None:
    merged = taken(delta((2, "x")), delta((0, "a"), (2, "y")), delta((1, "k")))
    assert [(c.index, c.text) for c in merged.outputs] == [(0, "a"), (1, "k"), (2, "xy")]
    assert not merged.finished


def test_an_end_without_a_token_takes_no_logprobs_away() -> None:
    end = delta(end="abort")
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")
    (merged,) = taken(delta((0, "a")), dataclasses.replace(end, outputs=[completion])).outputs
    assert [list(position) for position in merged.logprobs] == [[97]]
    assert merged.finish_reason == "abort"


def test_error_comes_behind_what_came_before_it() -> None:
    async def run() -> None:
        stream = OutputStream("r", engine_request_id="r-0")
        for item in (delta((0, "a")), delta((0, "b")), EngineDeadError("the engine has ended")):
            stream.queue.put_nowait(item)
        assert (await stream.take_all()).outputs[0].text == "ab"
        for take in (stream.take_all, stream.take):
            with pytest.raises(EngineDeadError, match="has ended"):
                await take()

    asyncio.run(run())
    with pytest.raises(EngineDeadError):
        taken(EngineDeadError("it was never alive"))
