"""BlockChangeLog: which blocks of a pool changed, for someone who looks at it now and then."""

from collections.abc import Iterable, Sequence

import msgspec

from paxkv.contracts.cache_request import CacheRequest
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_hash import BlockHash


# Not a dataclass: one is made for every block that becomes full.
class BlockOrigin(msgspec.Struct, frozen=True, gc=False):
    """Where the content of a cached block stood in the request that computed it.

    Args:
        parent_hash: Of the block before it; None where it is the first.
        block_idx: Its place in the request's block table.
        token_ids: Those in the block.
    """

    parent_hash: BlockHash | None
    block_idx: int
    token_ids: tuple[int, ...]


class BlockChangeLog:
    """Collects ids and counts only: what a block is now, its pool says.

    Bounded by the number of blocks, however long nobody looks.

    Attributes:
        changed: Blocks that changed since `take_changed`, null blocks among them; those that became
            findable come at its next call.
        has_freed: Whether somebody let go of a block since then.
        has_shared: Whether somebody found, or shared, one.
        num_evictions: Blocks that lost their content, since the log was made.
        num_hits: By block id, how often cached content was found or shared since it was cached.
    """

    def __init__(self) -> None:
        self.changed: set[KVCacheBlock] = set()
        self.has_freed = False
        self.has_shared = False
        self.num_evictions = 0
        self.num_hits: dict[int, int] = {}
        self._origins: dict[int, BlockOrigin] = {}
        # Blocks that became findable, and what `learn_origin` needs of each: the step that caches
        # them does no more than this.
        self._cached: dict[KVCacheBlock, tuple[CacheRequest, int, Sequence[BlockHash], int]] = {}

    @property
    def origins(self) -> dict[int, BlockOrigin]:
        """By block id, of content that was cached since the log was made."""
        self._learn_cached()
        return self._origins

    def on_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.changed.update(blocks)
        if self.num_hits:
            for block in blocks:
                self.num_hits.pop(block.block_id, None)

    def on_freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Each lost a holder."""
        self.changed.update(blocks)
        self.has_freed = True

    def on_shared(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Each got one more holder: prefix hits and forks."""
        self.has_shared = True
        num_hits = self.num_hits
        for block in blocks:
            num_hits[block.block_id] = num_hits.get(block.block_id, 0) + 1
            self.changed.add(block)

    def on_cached(
        self,
        request: CacheRequest,
        block: KVCacheBlock,
        block_idx: int,
        block_hashes: Sequence[BlockHash],
        block_size: int,
    ) -> None:
        """A block of a request became findable; `block_hashes` are of blocks of its size."""
        self._cached[block] = (request, block_idx, block_hashes, block_size)

    def learn_origin(
        self,
        request: CacheRequest,
        block: KVCacheBlock,
        block_idx: int,
        block_hashes: Sequence[BlockHash],
        block_size: int,
    ) -> None:
        """The same of a block that was cached before the log was made."""
        start = block_idx * block_size
        self._origins[block.block_id] = BlockOrigin(
            block_hashes[block_idx - 1] if block_idx else None,
            block_idx,
            # Tuples of numbers are nothing to the garbage collector, lists are.
            tuple(request.all_token_ids[start : start + block_size]),
        )

    def on_evicted(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self.changed.add(block)
            self.num_hits.pop(block.block_id, None)
            self._origins.pop(block.block_id, None)
            self._cached.pop(block, None)
            self.num_evictions += 1

    def take_changed(self) -> tuple[set[KVCacheBlock], bool, bool]:
        """`changed`, `has_freed` and `has_shared`, and forgets them."""
        self._learn_cached()
        taken = self.changed, self.has_freed, self.has_shared
        self.changed, self.has_freed, self.has_shared = set(), False, False
        return taken

    def _learn_cached(self) -> None:
        cached, self._cached = self._cached, {}
        self.changed.update(cached)
        # A request's tokens and hashes only grow: they are those that it was cached with.
        for block, (request, block_idx, block_hashes, block_size) in cached.items():
            self.learn_origin(request, block, block_idx, block_hashes, block_size)
