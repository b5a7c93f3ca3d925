"""Waiting deltas are merged without loss, and need a fraction of the memory."""

import dataclasses
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from paxkv.client.waiting_output import WaitingOutput
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput


def logprobs_of(numbers: list[float]) -> dict[int, Logprob]:
    return {
        idx: Logprob(logprob=number, rank=idx + 1, decoded_token=f"é{idx}")
        for idx, number in enumerate(numbers)
    }


def delta(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        outputs=list(completions),
        finished=False,
    )


floats = st.floats(allow_nan=False, max_value=0)
completions = st.builds(
    CompletionOutput,
    index=st.integers(0, 2),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    token_ids=st.lists(st.integers(0, 2**31)),
    cumulative_logprob=floats,
    logprobs=st.lists(st.lists(floats, max_size=3).map(logprobs_of)) | st.none(),
)


@given(added=st.lists(completions, min_size=1, max_size=6), packs_early=st.booleans())
def test_merged_output_has_all_parts_in_order(added, packs_early) -> None:
    waiting = WaitingOutput(delta(added[0]))
    if packs_early:
        waiting.pack()
    for completion in added[1:]:
        waiting.add(delta(completion))
    merged = waiting.output().outputs
    assert [completion.index for completion in merged] == sorted({c.index for c in added})
    for completion in merged:
        parts = [part for part in added if part.index == completion.index]
        logprobs = [position for part in parts for position in part.logprobs or ()]
        has_logprobs = any(part.logprobs is not None for part in parts)
        assert completion == dataclasses.replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            logprobs=logprobs if has_logprobs else None,
        )


def test_waiting_logprobs_need_a_fraction_of_their_memory() -> None:
    def one() -> RequestOutput:
        found = logprobs_of([-0.1 * idx for idx in range(21)])
        return delta(CompletionOutput(index=0, text="a", token_ids=[1], logprobs=[found]))

    def measured(outputs: object) -> int:
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    as_objects = [one() for _ in range(200)]
    num_object_bytes = measured(as_objects)
    before = tracemalloc.get_traced_memory()[0]
    waiting = WaitingOutput(one())
    for _ in range(199):
        waiting.add(one())
    num_packed_bytes = measured(waiting)
    tracemalloc.stop()
    assert num_packed_bytes < num_object_bytes / 4
    # `num_bytes` is about the memory that is used.
    assert 0.5 < waiting.num_bytes / num_packed_bytes <= 1.0
