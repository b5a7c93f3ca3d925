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
        changed: Blocks that changed since `take_changed`, null blocks among them.
        has_freed: Whether somebody let go of a block since then.
        num_evictions: Blocks that lost their content, since the log was made.
        num_hits: By block id, how often cached content was found or shared since it was cached.
        origins: By block id, of content that was cached since the log was made.
    """

    def __init__(self) -> None:
        self.changed: set[KVCacheBlock] = set()
        self.has_freed = False
        self.num_evictions = 0
        self.num_hits: dict[int, int] = {}
        self.origins: dict[int, BlockOrigin] = {}

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
        self.changed.add(block)
        self.learn_origin(request, block, block_idx, block_hashes, block_size)

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
        self.origins[block.block_id] = BlockOrigin(
            block_hashes[block_idx - 1] if block_idx else None,
            block_idx,
            # Tuples of numbers are nothing to the garbage collector, lists are.
            tuple(request.all_token_ids[start : start + block_size]),
        )

    def on_evicted(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self.changed.add(block)
            self.num_hits.pop(block.block_id, None)
            self.origins.pop(block.block_id, None)
            self.num_evictions += 1

    def take_changed(self) -> tuple[set[KVCacheBlock], bool]:
        """`changed` and `has_freed`, and forgets them."""
        taken = self.changed, self.has_freed
        self.changed, self.has_freed = set(), False
        return taken
