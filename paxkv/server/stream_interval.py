"""Merges the deltas of streams, so that an event carries several tokens."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from paxkv.contracts.request_output import CompletionOutput, RequestOutput

IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


def in_intervals(outputs: IndexedOutputs, interval: int) -> IndexedOutputs:
    """The same deltas in fewer outputs.

    As in vLLM, the first tokens of a completion, and its last ones, come at once. In between, an
    output has at least `interval` tokens of each of its completions.

    Args:
        outputs: Deltas of one HTTP request.
        interval: 1 changes nothing.
    """
    return outputs if interval == 1 else _merged_outputs(outputs, interval)


async def _merged_outputs(outputs: IndexedOutputs, interval: int) -> IndexedOutputs:
    pending: dict[tuple[int, int], CompletionOutput] = {}
    begun: set[tuple[int, int]] = set()
    async with aclosing(outputs):
        async for prompt_idx, output in outputs:
            ready = []
            for delta in output.outputs:
                key = (prompt_idx, delta.index)
                merged = _merged(pending.pop(key, None), delta)
                is_first = key not in begun and bool(merged.token_ids)
                if is_first or merged.finished or len(merged.token_ids) >= interval:
                    begun.add(key)
                    ready.append(merged)
                else:
                    pending[key] = merged
            # Also without completions: the prompt's log-probabilities come once.
            if ready or output.prompt_logprobs is not None or output.finished:
                yield prompt_idx, dataclasses.replace(output, outputs=ready)


def _merged(earlier: CompletionOutput | None, delta: CompletionOutput) -> CompletionOutput:
    """Two deltas as one; all else is the later one's."""
    if earlier is None:
        return delta
    logprobs = delta.logprobs
    if earlier.logprobs is not None:
        logprobs = [*earlier.logprobs, *(delta.logprobs or ())]
    return dataclasses.replace(
        delta,
        text=earlier.text + delta.text,
        token_ids=[*earlier.token_ids, *delta.token_ids],
        logprobs=logprobs,
    )
