"""BlockMovements: which blocks were handed out, shared, freed, cached and forgotten, in order."""

from collections.abc import Iterable

import msgspec

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


class BlockMovementLog:
    """Collects what a pool reports, until it is taken."""

    def __init__(self) -> None:
        self._movements = BlockMovements()

    def on_allocated(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._movements.allocated += [block.block_id for block in blocks]

    def on_shared(self, block: KVCacheBlock) -> None:
        self._movements.shared.append(block.block_id)

    def on_freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._movements.freed += [block.block_id for block in blocks]

    def on_cached(self, block: KVCacheBlock) -> None:
        self._movements.cached.append(block.block_id)

    def on_evicted(self, block: KVCacheBlock) -> None:
        self._movements.evicted.append(block.block_id)

    def take(self) -> BlockMovements:
        """What was collected since the last call, and forgets it."""
        taken, self._movements = self._movements, BlockMovements()
        return taken
