"""KVEventRecorder: collects the KV cache events of a pool."""

from collections.abc import Container, Sequence

from paxkv.contracts.kv_cache_spec import KVCacheSpec, SlidingWindowSpec
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
    """Records hashes that enter and leave the prefix cache.

    If several blocks have the same hash, it is reported as stored with the first block, and as
    removed with the last. So a receiver that adds stored hashes to a set, and deletes removed
    hashes, always has the set of cached hashes.

    Args:
        specs: The spec of each KV cache group, in order.
    """

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self._specs = tuple(specs)
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
        """Records the blocks whose hash is new, with one event per run of consecutive blocks.

        An event names one parent, so it must not span a gap.
        """
        spec = self._specs[group_id]
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
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
                    kind=spec.kind,
                    sliding_window=window,
                )
            )

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        """Records the hashes that no block has any more, with one event per group."""
        removed: dict[int, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            if key not in findable:
                removed.setdefault(get_group_id(key), []).append(get_block_hash(key))
        for group_id, block_hashes in removed.items():
            self._events.append(BlockRemoved(block_hashes=block_hashes, group_id=group_id))

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[KVCacheEvent]:
        """Returns the events since the last call, in order."""
        drained, self._events = self._events, []
        return drained
