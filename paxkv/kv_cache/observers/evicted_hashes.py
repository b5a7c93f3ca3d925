"""EvictedHashes: the hashes that a pool forgot lately."""

from collections import deque
from collections.abc import Collection

from paxkv.kv_cache.hashing.block_hash import BlockHashWithGroupId

MAX_EVICTED_HASHES = 65_536  # about 100 bytes each


class EvictedHashes:
    """A bounded memory, cheap to write and slow to ask: evictions are many, questions few.

    Args:
        num_evicted: Hashes forgotten since the start: a clock, by which a question about the past
            says when.
    """

    def __init__(self, max_hashes: int = MAX_EVICTED_HASHES) -> None:
        self.num_evicted = 0
        self._keys: deque[BlockHashWithGroupId] = deque(maxlen=max_hashes)

    def add(self, keys: Collection[BlockHashWithGroupId]) -> None:
        self._keys.extend(keys)
        self.num_evicted += len(keys)

    def contains(self, key: BlockHashWithGroupId, *, before: int) -> bool:
        """Whether `key` was forgotten when `num_evicted` was still below `before`, in O(n)."""
        try:
            position = self._keys.index(key)
        except ValueError:
            return False
        return self.num_evicted - len(self._keys) + position < before

    def clear(self) -> None:
        self._keys.clear()
