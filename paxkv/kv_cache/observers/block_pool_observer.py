"""BlockPoolObserver: what a block pool reports to an object that watches it."""

from collections.abc import Container, Sequence
from typing import Protocol

from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHashWithGroupId
from paxkv.kv_cache.pool.block import KVCacheBlock


class BlockPoolObserver(Protocol):
    """An observer of a `BlockPool`; a subclass overrides the methods of the events that it needs.

    The pool calls a method after it has made the change. An observer must not change the pool or
    its blocks. Null blocks never move, so no event is about them.
    """

    def on_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free blocks were handed out; each has one holder. Their eviction was reported before."""

    def on_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Each block got one more holder, by a prefix hit or a fork."""

    def on_released(
        self, blocks: Sequence[KVCacheBlock], free_blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Each of `blocks` lost a holder; `free_blocks` are those that have none left."""

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
        """Blocks of one request and one KV cache group became findable by hash.

        Args:
            blocks: All blocks of the request in the group.
            block_idxs: Positions in `blocks` of those that became findable, rising.
            first_idxs: The part of `block_idxs` whose hash no other block had.
            block_hashes: One for each full block of the request, of `block_size` tokens each.
        """

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        """Blocks lost their hash, whether or not a request holds them.

        Args:
            keys: The hash that each of `blocks` had.
            findable: The hashes that a block has now: another block may have one of `keys`.
        """

    def on_replaced(self, request_id: str) -> None:
        """Another block took the place of one in the middle of the request's block table."""

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The prefix cache was emptied; `blocks`, by rising id, lost their hash. All are free."""
