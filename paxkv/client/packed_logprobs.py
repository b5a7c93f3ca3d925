"""`PackedLogprobs`: stores the log-probabilities of an answer as bytes until they are read."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from paxkv.contracts.request_output import Logprob

# Token id, log-probability, rank and text of each candidate.
PackedPosition = list[tuple[int, float, int, str]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PackedPosition)


class PackedLogprobs(Sequence[dict[int, Logprob]]):
    """A sequence of positions that needs less memory than a list. Each read creates new objects."""

    def __init__(self) -> None:
        self._packed = bytearray()
        # End offset of each position.
        self._ends = array("Q")

    def append(self, position: dict[int, Logprob]) -> None:
        """Adds the next position."""
        _encoder.encode_into(to_packed(position), self._packed, -1)
        self._ends.append(len(self._packed))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        places = range(len(self._ends))[index]
        if isinstance(places, range):
            return [self._at(place) for place in places]
        return self._at(places)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return map(self._at, range(len(self._ends)))

    def _at(self, place: int) -> dict[int, Logprob]:
        start = self._ends[place - 1] if place else 0
        with memoryview(self._packed) as packed:
            return from_packed(_decoder.decode(packed[start : self._ends[place]]))


def to_packed(position: dict[int, Logprob]) -> PackedPosition:
    """Converts a position's candidates to tuples, in their order."""
    return [
        (token_id, found.logprob, found.rank, found.decoded_token)
        for token_id, found in position.items()
    ]


def from_packed(position: PackedPosition) -> dict[int, Logprob]:
    """The inverse of `to_packed`."""
    return {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=text)
        for token_id, logprob, rank, text in position
    }
