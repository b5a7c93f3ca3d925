"""BlockMovements: which blocks were handed out, shared, freed, cached and forgotten, in order."""

from collections.abc import Container, Sequence

import msgspec

from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHashWithGroupId
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock


class BlockMovements(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Block ids by what happened to them, each list in the order in which it happened.

    Args:
        allocated: Handed out anew.
        shared: Got one more holder: prefix hits and forks.
        freed: Lost their last holder.
        cached: Became findable by hash.
        evicted: Are findable no more.
    """

    allocated: list[int] = []
    shared: list[int] = []
    freed: list[int] = []
    cached: list[int] = []
    evicted: list[int] = []


class BlockMovementLog(BlockPoolObserver):
    """Collects the movements of a pool's blocks until they are taken."""

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
        self._movements.cached += [blocks[idx].block_id for idx in block_idxs]

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        self._movements.evicted += [block.block_id for block in blocks]

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._movements.evicted += [block.block_id for block in blocks]

    def take(self) -> BlockMovements:
        """What was collected since the last call, and forgets it."""
        taken, self._movements = self._movements, BlockMovements()
        return taken
