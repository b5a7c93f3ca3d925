"""KVCacheBlock, the host's record of one block, and the queue of those that are free."""

import dataclasses
from collections.abc import Iterable

from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHashWithGroupId


@dataclasses.dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of KV memory; `BlockPool` owns it and is the only one to change it.

    Args:
        ref_cnt: Requests that hold it; 0 exactly while it is in the free queue (or is null).
        block_hash: Set exactly while the block can be found in the prefix cache.
        is_null: The placeholder block 0, which no request owns.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHashWithGroupId | None = None
    is_null: bool = False
    # Links of `FreeKVCacheBlockQueue`, which alone sets them; None outside the queue.
    prev_free_block: "KVCacheBlock | None" = dataclasses.field(default=None, repr=False)
    next_free_block: "KVCacheBlock | None" = dataclasses.field(default=None, repr=False)


class FreeKVCacheBlockQueue:
    """Free blocks, the first to be handed out in front.

    A doubly linked list through the blocks themselves: a prefix hit takes a block out of the
    middle in O(1), which a deque cannot, and no operation allocates.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        # Sentinels: every block in the queue has a neighbour on both sides.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Takes the block in front.

        Raises:
            InvariantError: The queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes `num_blocks` blocks from the front, in order.

        Raises:
            InvariantError: There are fewer.
        """
        if num_blocks > self.num_free_blocks:
            raise InvariantError(f"wanted {num_blocks=} free blocks, got {self.num_free_blocks}.")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in range(num_blocks):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= num_blocks
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Takes `block` out, wherever it stands.

        Raises:
            InvariantError: It is not in the queue.
        """
        if block.prev_free_block is None:
            raise InvariantError(f"{block!r} is not in the free queue.")
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Puts `block` at the end.

        Raises:
            InvariantError: It is in the queue already.
        """
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts `blocks` at the end, in order.

        Raises:
            InvariantError: One of them is in the queue already.
        """
        last = self._tail.prev_free_block
        for block in blocks:
            if block.prev_free_block is not None:
                raise InvariantError(f"{block!r} is in the free queue already.")
            last.next_free_block = block
            block.prev_free_block = last
            last = block
            self.num_free_blocks += 1
        last.next_free_block = self._tail
        self._tail.prev_free_block = last

    def get_first(self, max_blocks: int) -> list[KVCacheBlock]:
        """At most so many blocks, from the front on: those that are handed out next."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not self._tail and len(blocks) < max_blocks:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks from front to end, in O(n): for tests and invariants."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not self._tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks
