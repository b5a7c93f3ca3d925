"""SentTables: block tables as somebody was told of them, and how they differ by now."""

from collections.abc import Callable, Sequence

from paxkv.contracts.inspection import TableChange
from paxkv.inspector.block_columns import u32
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.single_type_manager import SingleTypeKVCacheManager


class _SentTable:
    __slots__ = ("blocks", "num_skipped")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_skipped = 0


class SentTables:
    """What was told of the block tables of one KV cache group."""

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self._manager = manager
        self._sent: dict[int, _SentTable] = {}

    def take_changes(
        self, key_of: Callable[[str], int], *, has_freed: bool
    ) -> tuple[list[TableChange], set[int]]:
        """Tables that changed since the last call, and the keys of all that hold blocks.

        Args:
            key_of: Of a request id.
            has_freed: Whether a table may have changed otherwise than by growing: each block that
                leaves a table is freed.
        """
        changes: list[TableChange] = []
        holders: set[int] = set()
        skipped = self._manager.num_skipped_blocks
        group_id, tables = self._manager.kv_cache_group_id, self._sent
        for req_id, blocks in self._manager.req_to_blocks.items():
            key = key_of(req_id)
            holders.add(key)
            sent = tables.get(key)
            if sent is None:
                sent = tables[key] = _SentTable()
            num_sent, num_skipped = len(sent.blocks), skipped.get(req_id, 0)
            if has_freed or num_skipped or num_sent > len(blocks):
                num_kept = max(_num_common(sent, blocks, num_skipped), num_skipped)
                is_same = num_kept == num_sent == len(blocks)
                if is_same and num_skipped == sent.num_skipped:
                    continue
                new_blocks = blocks[num_kept:]
                sent.num_skipped = num_skipped
                if num_kept > num_sent:
                    sent.blocks = list(blocks)
                else:
                    sent.blocks[num_kept:] = new_blocks
            elif num_sent == len(blocks):
                continue
            else:
                # By far the most: a table that grew.
                num_kept, new_blocks = num_sent, blocks[num_sent:]
                sent.blocks += new_blocks
            changes.append(
                TableChange(
                    key=key,
                    group_id=group_id,
                    num_skipped=num_skipped,
                    num_kept=num_kept,
                    new_block_ids=u32([block.block_id for block in new_blocks]),
                )
            )
        if has_freed:
            changes += [self._lost_table(key) for key in self._sent.keys() - holders]
        return changes, holders

    def forget_all(self) -> None:
        """The next call tells everything."""
        self._sent.clear()

    def _lost_table(self, key: int) -> TableChange:
        del self._sent[key]
        return TableChange(
            key=key,
            group_id=self._manager.kv_cache_group_id,
            num_skipped=0,
            num_kept=0,
            new_block_ids=b"",
        )


def _num_common(sent: _SentTable, blocks: Sequence[KVCacheBlock], num_skipped: int) -> int:
    """Leading blocks that are those sent, where the skipped ones count as equal."""
    if num_skipped < sent.num_skipped:  # the request came back, and starts anew
        return 0
    num_blocks = min(len(sent.blocks), len(blocks))
    # Blocks are equal only to themselves, so that a comparison of lists looks at pointers.
    if sent.blocks[num_skipped:num_blocks] == blocks[num_skipped:num_blocks]:
        return num_blocks
    for block_idx in range(num_skipped, num_blocks):
        if sent.blocks[block_idx] is not blocks[block_idx]:
            return block_idx
    return num_blocks
