"""Merges deltas of streams, so that one event carries several tokens."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from paxkv.contracts.request_output import CompletionOutput, RequestOutput

IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


def in_intervals(outputs: IndexedOutputs, interval: int) -> IndexedOutputs:
    """Yields the same deltas in fewer outputs.

    As in vLLM, the first and the last tokens of a completion are not delayed. Other outputs have at
    least `interval` tokens per completion.

    Args:
        outputs: The deltas of one HTTP request.
        interval: Tokens per output; 1 changes nothing.
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
            # An output without completions may carry the prompt's log-probabilities, or the end.
            if ready or output.prompt_logprobs is not None or output.finished:
                yield prompt_idx, dataclasses.replace(output, outputs=ready)


def _merged(earlier: CompletionOutput | None, delta: CompletionOutput) -> CompletionOutput:
    """Joins the tokens of two deltas; all other fields come from the later one."""
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
