"""Deltas are merged without losing a token, and the first and last ones do not wait."""

import asyncio

import pytest

from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.server.stream_interval import in_intervals


def logprob(token_id):
    return {token_id: Logprob(logprob=-1.0, rank=1, decoded_token=chr(token_id))}


def deltas(*texts, index=0, has_logprobs=False):
    for i, text in enumerate(texts):
        yield CompletionOutput(
            index=index,
            text=text,
            token_ids=list(map(ord, text)),
            logprobs=[logprob(ord(letter)) for letter in text] if has_logprobs else None,
            finish_reason="length" if i + 1 == len(texts) else None,
        )


def merged(interval, *steps):
    """Steps are (prompt_idx, deltas)."""

    async def outputs():
        for prompt_idx, completions in steps:
            yield (
                prompt_idx,
                RequestOutput(
                    request_id="r",
                    prompt=None,
                    prompt_token_ids=[1],
                    outputs=list(completions),
                    finished=any(c.finished for c in completions),
                ),
            )

    async def collect():
        return [item async for item in in_intervals(outputs(), interval)]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("interval", "texts"),
    [
        (1, ["a", "b", "c", "d", "e", "f"]),
        (2, ["a", "bc", "de", "f"]),
        (3, ["a", "bcd", "ef"]),
        (100, ["a", "bcdef"]),
    ],
)
def test_outputs_have_the_stream_interval_except_the_first_and_the_last(interval, texts):
    steps = [(0, [delta]) for delta in deltas(*"abcdef", has_logprobs=True)]
    found = [output.outputs[0] for _, output in merged(interval, *steps)]
    assert [completion.text for completion in found] == texts
    assert [completion.token_ids for completion in found] == [list(map(ord, t)) for t in texts]
    assert [[*map(next, map(iter, c.logprobs))] for c in found] == [c.token_ids for c in found]
    assert [c.finish_reason for c in found] == [None] * (len(texts) - 1) + ["length"]


def test_bursts_are_not_split():
    steps = [(0, [delta]) for delta in deltas("ab", "cdefg", "h")]
    assert [o.outputs[0].text for _, o in merged(2, *steps)] == ["ab", "cdefg", "h"]


def test_completions_and_prompts_do_not_wait_for_each_other():
    first, second = list(deltas(*"abcd")), list(deltas(*"wxyz", index=1))
    steps = [(0, [first[0]]), (0, [first[1], second[0]]), (0, [second[1]]), (0, [first[2]])]
    steps += [(1, [first[0]]), (0, [second[2], first[3]]), (0, [second[3]])]
    found = [
        (prompt_idx, completion.index, completion.text)
        for prompt_idx, output in merged(2, *steps)
        for completion in output.outputs
    ]
    assert found == [
        *((0, 0, "a"), (0, 1, "w"), (0, 0, "bc"), (1, 0, "a"), (0, 1, "xy"), (0, 0, "d")),
        (0, 1, "z"),
    ]
