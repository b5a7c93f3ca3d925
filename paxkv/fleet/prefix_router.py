"""`PrefixRouter`: chooses the replica that computes a prompt, by cached prefixes and load."""

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from paxkv.errors import EngineDeadError
from paxkv.fleet.prompt_digest import CHUNK_TOKENS

# A replica that knows the beginning of a prompt may have more requests than the least busy replica.
# Requests of the least busy replica -> limit: 0 -> 0, 1 -> 2, 2 -> 4, 8 -> 10, 12 -> 15.
_MAX_EXTRA_REQUESTS = 2
_REQUESTS_PER_EXTRA = 4

_KeyT = TypeVar("_KeyT", bound=Hashable)


@dataclasses.dataclass(slots=True)
class _Place:
    """A replica's state.

    Args:
        bit: Stands for the replica in all sets of replicas, which are integers.
        max_chunks: Chunks that its KV cache holds.
        chunks: Chunks of the prompts most recently sent to it, least recent first. Within a prompt,
            later chunks come before earlier ones, so they are removed first: without the first
            chunk no chunk of the prompt can be found. An `OrderedDict`, because finding the first
            key of a plain dict takes longer after every removal of a first key.
    """

    bit: int
    max_chunks: int
    num_requests: int = 0
    chunks: OrderedDict[int, None] = dataclasses.field(default_factory=OrderedDict)


class PrefixRouter(Generic[_KeyT]):
    """Chooses replicas by the prompts that were sent to each, and by their numbers of requests.

    The prompts that a replica has received are an estimate of its prefix cache. The cache may hold
    fewer, because outputs use blocks too. A wrong guess only costs computing the prompt again.

    A set of replicas is an integer with one bit per replica. So a choice takes about as long with a
    thousand replicas as with two.
    """

    def __init__(self) -> None:
        self._places: dict[_KeyT, _Place] = {}
        # The key of each bit; None if the bit is free.
        self._keys: list[_KeyT | None] = []
        self._all = 0
        # Number of requests -> the replicas that have this number.
        self._by_load: list[int] = [0]
        # Chunk -> the replicas that know it.
        self._holders: dict[int, int] = {}

    def __contains__(self, key: _KeyT) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[_KeyT]:
        return iter(self._places)

    def add(self, key: _KeyT, max_tokens: int) -> None:
        """Adds a replica without requests, whose KV cache holds `max_tokens` token positions."""
        if None in self._keys:
            idx = self._keys.index(None)
            self._keys[idx] = key
        else:
            idx = len(self._keys)
            self._keys.append(key)
        place = _Place(bit=1 << idx, max_chunks=max_tokens // CHUNK_TOKENS)
        self._places[key] = place
        self._all |= place.bit
        self._by_load[0] |= place.bit

    def remove(self, key: _KeyT) -> None:
        """Removes a replica, if it is there."""
        if key not in self._places:
            return
        self.forget_prompts(key)
        place = self._places.pop(key)
        self._by_load[place.num_requests] &= ~place.bit
        self._all &= ~place.bit
        self._keys[place.bit.bit_length() - 1] = None

    def set_num_requests(self, key: _KeyT, num_requests: int) -> None:
        """Sets the number of a replica's unfinished requests."""
        place = self._places[key]
        while len(self._by_load) <= num_requests:
            self._by_load.append(0)
        self._by_load[place.num_requests] &= ~place.bit
        self._by_load[num_requests] |= place.bit
        place.num_requests = num_requests

    def choose(self, chain: Sequence[int], *, avoid: Collection[_KeyT] = ()) -> _KeyT:
        """Chooses the replica for a prompt.

        An idle replica gets the next request. If no replica is idle, the request goes to the one
        that knows the longest part of its prompt, among the replicas that are not much busier than
        the least busy one.

        Args:
            chain: The prompt's digests, empty if the request reads no cached blocks.
            avoid: Replicas that get the request only if there are no others.

        Raises:
            EngineDeadError: There is no replica.
        """
        if not self._all:
            raise EngineDeadError("all engines have ended.")
        candidates = self._all
        for key in avoid:
            if key in self._places:
                candidates &= ~self._places[key].bit
        candidates = candidates or self._all
        fewest = 0
        while not self._by_load[fewest] & candidates:
            fewest += 1
        # If a replica is idle, `most` is 0, so only idle replicas are candidates. If `most` were
        # larger, one replica would get all requests of a light load that share a system prompt,
        # and the others would never cache it.
        most = fewest + max(min(_MAX_EXTRA_REQUESTS, fewest), fewest // _REQUESTS_PER_EXTRA)
        loads = [load & candidates for load in self._by_load[fewest : most + 1]]
        nearest = 0
        for load in loads:
            nearest |= load
        # A replica that knows a chunk knows all chunks before it.
        for chunk in chain:
            holders = self._holders.get(chunk, 0) & nearest
            if not holders:
                break
            nearest = holders
        chosen = next(load & nearest for load in loads if load & nearest)
        # Of equal replicas, the first is chosen. So a client that sends one request at a time
        # always reaches the same prefix cache, also with prompts that are too short for a chain.
        return self._keys[(chosen & -chosen).bit_length() - 1]

    def record(self, key: _KeyT, chain: Sequence[int]) -> None:
        """Records a prompt that was sent to a replica."""
        place, holders = self._places[key], self._holders
        chunks, bit = place.chunks, place.bit
        for chunk in reversed(chain):
            if chunk in chunks:
                chunks.move_to_end(chunk)
            else:
                chunks[chunk] = None
                holders[chunk] = holders.get(chunk, 0) | bit
        for _ in range(len(chunks) - place.max_chunks):
            self._remove_holder(chunks.popitem(last=False)[0], bit)

    def num_known(self, key: _KeyT, chain: Sequence[int]) -> int:
        """Counts the leading chunks of a prompt that were sent to a replica before."""
        chunks = self._places[key].chunks
        for idx, chunk in enumerate(chain):
            if chunk not in chunks:
                return idx
        return len(chain)

    def forget_prompts(self, key: _KeyT) -> None:
        """Forgets a replica's prompts, after its cache was emptied."""
        place = self._places[key]
        for chunk in place.chunks:
            self._remove_holder(chunk, place.bit)
        place.chunks.clear()

    def _remove_holder(self, chunk: int, bit: int) -> None:
        holders = self._holders[chunk] & ~bit
        if holders:
            self._holders[chunk] = holders
        else:
            del self._holders[chunk]
