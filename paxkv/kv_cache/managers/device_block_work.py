"""DeviceBlockWork: what the device must do to whole blocks before a step's writes."""

from collections.abc import Iterable

from paxkv.contracts.scheduler_output import BlockCopy
from paxkv.kv_cache.pool.block import KVCacheBlock


class DeviceBlockWork:
    """Collects copies and new blocks while a step is being decided, until they are taken.

    Args:
        records_new_blocks: Whether new blocks are collected too: where groups read one memory as
            different dtypes, old bytes must be cleared.
    """

    def __init__(self, *, records_new_blocks: bool = False) -> None:
        self._records_new_blocks = records_new_blocks
        self._new_blocks: dict[int, KVCacheBlock] = {}
        # Target id -> (source, target). A source holds what it held before the step.
        self._copies: dict[int, tuple[KVCacheBlock, KVCacheBlock]] = {}

    def record_copy(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """`target`, just handed out, is to begin with the content of `source`."""
        # All copies are done at once. One of a block that is itself still to be copied to is
        # therefore one of the block that its content comes from: 5 -> 7, 7 -> 9 is 5 -> 7, 5 -> 9.
        if source.block_id in self._copies:
            source = self._copies[source.block_id][0]
        self._copies[target.block_id] = (source, target)
        # A copy fills the whole block, so nothing old is left in it.
        self._new_blocks.pop(target.block_id, None)

    def record_new_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """`blocks` were just handed out, and nothing is copied into them."""
        if self._records_new_blocks:
            self._new_blocks.update((block.block_id, block) for block in blocks)

    def forget_freed_targets(self) -> None:
        """Drops copies into blocks that nobody holds any more; others may get them now."""
        if self._copies:
            self._copies = {
                block_id: copy for block_id, copy in self._copies.items() if copy[1].ref_cnt > 0
            }

    def take_copies(self) -> list[BlockCopy]:
        """Copies since the last call, no two to one target, to be done all at once."""
        if not self._copies:
            return []
        copies = [
            BlockCopy(source_block_id=source.block_id, target_block_id=target.block_id)
            for source, target in self._copies.values()
            if source is not target
        ]
        self._copies = {}
        return copies

    def take_new_block_ids(self) -> list[int]:
        """New blocks since the last call, whose old bytes are to be cleared after the copies."""
        if not self._new_blocks:
            return []
        block_ids = list(self._new_blocks)
        self._new_blocks = {}
        return block_ids
