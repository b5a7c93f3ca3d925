"""BlockPoolObserver: the events that a block pool reports."""

from collections.abc import Container, Sequence
from typing import Protocol

from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHashWithGroupId
from paxkv.kv_cache.pool.block import KVCacheBlock


class BlockPoolObserver(Protocol):
    """An observer of a `BlockPool`. Subclasses override the methods of the events they need.

    The pool calls a method after it has made the change. An observer must not change the pool or
    its blocks. The null block does not occur in events.
    """

    def on_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks were allocated; each has one holder. Their eviction was reported before."""

    def on_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Each block got one more holder, by a prefix hit or a fork."""

    def on_released(
        self, blocks: Sequence[KVCacheBlock], free_blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Each of `blocks` lost a holder; `free_blocks` have no holder left."""

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
        """Blocks of one request and one KV cache group entered the prefix cache.

        Args:
            blocks: The blocks that entered the cache, in the order of their tokens.
            block_idxs: For each of them, the number of blocks of `block_size` tokens before it.
            first_idxs: The part of `block_idxs` whose hash no other block had.
            block_hashes: One hash for each full block of `block_size` tokens of the request.
        """

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        """Blocks lost their hash. Requests may still hold them.

        Args:
            keys: The hash that each of `blocks` had.
            findable: All hashes that are still cached. Another block may have one of `keys`.
        """

    def on_replaced(self, request_id: str) -> None:
        """A block in the middle of the request's block table was replaced by another block."""

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The prefix cache was emptied. `blocks`, sorted by id, lost their hash; all are free."""
