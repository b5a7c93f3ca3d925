"""`WaitingOutput`: merges and packs the outputs of one request that wait for their reader."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from paxkv.client.packed_logprobs import PackedPosition, from_packed, to_packed
from paxkv.contracts.request_output import CompletionOutput, RequestOutput

_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


class _Delta(msgspec.Struct, array_like=True, gc=False):
    """The new part of one completion; `positions` are its log-probabilities."""

    index: int
    text: str
    token_ids: list[int]
    positions: list[PackedPosition] | None


_decoder = msgspec.msgpack.Decoder(_Delta)


class WaitingOutput:
    """Merges deltas of one request into one output.

    The first output stays unpacked until `pack` or `add`. After that, all outputs are stored as
    bytes, because objects with log-probabilities take about eight times as much memory.
    """

    def __init__(self, output: RequestOutput) -> None:
        # `outputs` is empty after `pack`.
        self._latest = output
        self._latest_completions: dict[int, CompletionOutput] = {}
        # Deltas in order; the length of each precedes it.
        self._packed = bytearray()

    @property
    def request_id(self) -> str:
        return self._latest.request_id

    @property
    def num_bytes(self) -> int:
        """Size of the packed deltas."""
        return len(self._packed)

    def pack(self) -> None:
        """Converts an output that is still stored as objects to bytes."""
        self._pack(self._latest)
        self._latest = dataclasses.replace(self._latest, outputs=[])

    def add(self, output: RequestOutput) -> None:
        """Merges the next delta."""
        self.pack()
        self._pack(output)
        # Only the first delta of a stream has prompt log-probabilities.
        prompt_logprobs = self._latest.prompt_logprobs or output.prompt_logprobs
        self._latest = dataclasses.replace(output, outputs=[], prompt_logprobs=prompt_logprobs)

    def output(self) -> RequestOutput:
        """Returns all deltas merged into one output."""
        if not self._packed:
            return self._latest
        deltas: dict[int, list[_Delta]] = defaultdict(list)
        for delta in self._unpack():
            deltas[delta.index].append(delta)
        latest = self._latest_completions
        merged = [_merge(latest[index], deltas[index]) for index in sorted(deltas)]
        return dataclasses.replace(self._latest, outputs=merged)

    def _pack(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            delta = _Delta(
                completion.index,
                completion.text,
                completion.token_ids,
                None if completion.logprobs is None else list(map(to_packed, completion.logprobs)),
            )
            start = len(self._packed)
            self._packed += bytes(_LENGTH_BYTES)
            _encoder.encode_into(delta, self._packed, -1)
            length = len(self._packed) - start - _LENGTH_BYTES
            self._packed[start : start + _LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "big")
            self._latest_completions[completion.index] = dataclasses.replace(
                completion, text="", token_ids=[], logprobs=None
            )

    def _unpack(self) -> Iterator[_Delta]:
        packed = memoryview(self._packed)
        position = 0
        while position < len(packed):
            start = position + _LENGTH_BYTES
            position = start + int.from_bytes(packed[position:start], "big")
            yield _decoder.decode(packed[start:position])


def _merge(latest: CompletionOutput, deltas: list[_Delta]) -> CompletionOutput:
    has_logprobs = any(delta.positions is not None for delta in deltas)
    logprobs = [from_packed(found) for delta in deltas for found in delta.positions or ()]
    return dataclasses.replace(
        latest,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs if has_logprobs else None,
    )
