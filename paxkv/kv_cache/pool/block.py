"""KVCacheBlock, the host's record of one block, and the queue of free blocks."""

import dataclasses
from collections.abc import Iterable

from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHashWithGroupId


@dataclasses.dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of KV memory. Only its `BlockPool` changes it.

    Args:
        ref_cnt: Number of holders. It is 0 if and only if the block is free or null.
        block_hash: Set if and only if the block is in the prefix cache.
        is_null: True for block 0, a placeholder that no request holds.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHashWithGroupId | None = None
    is_null: bool = False
    # Links of `FreeKVCacheBlockQueue`, which alone sets them; None outside the queue.
    prev_free_block: "KVCacheBlock | None" = dataclasses.field(default=None, repr=False)
    next_free_block: "KVCacheBlock | None" = dataclasses.field(default=None, repr=False)


class Slot(list[KVCacheBlock]):
    """The blocks of a slot of states, which never change.

    Attributes:
        block_ids: Their ids. The list is always the same object.
    """

    __slots__ = ("block_ids",)

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        super().__init__(blocks)
        self.block_ids = [block.block_id for block in self]


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they are allocated.

    The blocks themselves form a doubly linked list. Unlike a deque, it can remove a block from the
    middle in O(1), as a prefix hit does. No operation allocates memory per block in the queue.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        # With sentinels, every block in the queue has a neighbour on both sides.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Removes and returns the block at the front.

        Raises:
            InvariantError: The queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, num_blocks: int) -> list[KVCacheBlock]:
        """Removes and returns the first `num_blocks` blocks, in order.

        Raises:
            InvariantError: The queue has fewer blocks.
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
        """Removes `block` from any place in the queue.

        Raises:
            InvariantError: The block is not in the queue.
        """
        if block.prev_free_block is None:
            raise InvariantError(f"{block!r} is not in the free queue.")
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Adds `block` at the end.

        Raises:
            InvariantError: The block is in the queue already.
        """
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds `blocks` at the end, in order.

        Raises:
            InvariantError: One of the blocks is in the queue already.
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
        """The blocks that are allocated next, at most `max_blocks` of them."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not self._tail and len(blocks) < max_blocks:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks from front to end, in O(n). For tests and checks of invariants."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not self._tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks
