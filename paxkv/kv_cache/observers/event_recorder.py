"""KVEventRecorder: what became findable in a pool, and what no longer is, until it is taken."""

from collections.abc import Container, Sequence

from paxkv.contracts.observation import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
)
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock


class KVEventRecorder(BlockPoolObserver):
    """Speaks of hashes, not of blocks: equal content in two blocks is stored once, removed once.

    So a set to which stored hashes are added, and from which removed ones are taken, is at any
    moment what the pool can find.
    """

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

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
        """Records the blocks whose hash is new, one event for each unbroken run of them.

        After a gap, the parent of the next block is not the last block of the run before it.
        """
        run_start = 0
        for position, block_idx in enumerate(first_idxs, start=1):
            if position < len(first_idxs) and first_idxs[position] == block_idx + 1:
                continue
            start, end = first_idxs[run_start], block_idx + 1
            run_start = position
            self._events.append(
                BlockStored(
                    block_hashes=[block_hashes[idx] for idx in range(start, end)],
                    parent_block_hash=block_hashes[start - 1] if start > 0 else None,
                    token_ids=list(request.all_token_ids[start * block_size : end * block_size]),
                    block_size=block_size,
                    lora_name=request.lora_name,
                    group_id=group_id,
                )
            )

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        """Records the hashes that no block has any more, one event per group."""
        removed: dict[int, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            if key not in findable:
                removed.setdefault(get_group_id(key), []).append(get_block_hash(key))
        for group_id, block_hashes in removed.items():
            self._events.append(BlockRemoved(block_hashes=block_hashes, group_id=group_id))

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call, in order, and forgets it."""
        taken, self._events = self._events, []
        return taken
