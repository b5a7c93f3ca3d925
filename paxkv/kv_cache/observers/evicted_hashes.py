"""EvictedHashes: the hashes that a pool evicted recently."""

from collections import deque
from collections.abc import Collection

from paxkv.kv_cache.hashing.block_hash import BlockHashWithGroupId

MAX_EVICTED_HASHES = 65_536  # about 100 bytes each


class EvictedHashes:
    """A bounded memory of evicted hashes. Adding is cheap; `contains` is slow, but rarely called.

    Attributes:
        num_evicted: Hashes evicted since the start. It serves as a clock for `contains`.
    """

    def __init__(self, max_hashes: int = MAX_EVICTED_HASHES) -> None:
        self.num_evicted = 0
        self._keys: deque[BlockHashWithGroupId] = deque(maxlen=max_hashes)

    def add(self, keys: Collection[BlockHashWithGroupId]) -> None:
        self._keys.extend(keys)
        self.num_evicted += len(keys)

    def contains(self, key: BlockHashWithGroupId, *, before: int) -> bool:
        """Whether `key` was evicted before `num_evicted` reached `before`, in O(n)."""
        try:
            position = self._keys.index(key)
        except ValueError:
            return False
        return self.num_evicted - len(self._keys) + position < before

    def clear(self) -> None:
        self._keys.clear()
