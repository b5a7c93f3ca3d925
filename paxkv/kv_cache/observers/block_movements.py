"""BlockMovements: the blocks that were allocated, shared, freed, cached and evicted."""

from collections.abc import Container, Sequence

import msgspec

from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHashWithGroupId
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock


class BlockMovements(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Block ids by kind of change, each list in the order of the changes.

    Args:
        allocated: Blocks that were allocated.
        shared: Blocks that got one more holder, by a prefix hit or a fork.
        freed: Blocks that lost their last holder.
        cached: Blocks that entered the prefix cache.
        evicted: Blocks that left the prefix cache.
    """

    allocated: list[int] = []
    shared: list[int] = []
    freed: list[int] = []
    cached: list[int] = []
    evicted: list[int] = []


class BlockMovementLog(BlockPoolObserver):
    """Collects the movements of a pool's blocks until `drain` returns them."""

    def __init__(self) -> None:
        self._movements = BlockMovements()

    def on_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._movements.allocated += [block.block_id for block in blocks]

    def on_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._movements.shared += [block.block_id for block in blocks]

    def on_released(
        self, blocks: Sequence[KVCacheBlock], free_blocks: Sequence[KVCacheBlock]
    ) -> None:
        self._movements.freed += [block.block_id for block in free_blocks]

    def on_cached(
        self,
        *,
        request: CacheRequest,
        blocks: Sequence[KVCacheBlock],
        block_idxs: Sequence[int],
        first_idxs: Sequence[int],
        block_hashes: Sequence[BlockHash],
        block_size: int,
        group_id: int,
    ) -> None:
        self._movements.cached += [block.block_id for block in blocks]

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        self._movements.evicted += [block.block_id for block in blocks]

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._movements.evicted += [block.block_id for block in blocks]

    def drain(self) -> BlockMovements:
        """Returns the movements since the last call."""
        drained, self._movements = self._movements, BlockMovements()
        return drained
