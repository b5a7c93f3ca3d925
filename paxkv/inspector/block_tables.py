"""`SentTables`: finds changes of block tables since the last frame."""

from collections.abc import Callable, Collection

import numpy as np

from paxkv.contracts.observation import TableChanges
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock


class TableChangeLists:
    """Collects the content of a `TableChanges`.

    Attributes:
        rows: See `TableChanges.rows`.
        new_blocks: New blocks of all changed tables, in the order of `rows`.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.new_blocks: list[KVCacheBlock] = []

    def encode(self) -> TableChanges:
        ids_np = np.array([block.block_id for block in self.new_blocks], "<u4")
        return TableChanges(rows=self.rows, new_block_ids=ids_np.tobytes())


class _SentTable:
    __slots__ = ("blocks", "key", "num_blocks", "num_skipped")

    def __init__(self, key: int, blocks: list[KVCacheBlock]) -> None:
        self.key = key
        # The manager's own list. If a request has another list object later, its table is new.
        self.blocks = blocks
        self.num_blocks = 0
        self.num_skipped = 0


class SentTables:
    """Remembers which blocks of one KV cache group's tables were sent in frames.

    A table grows only at its end and loses blocks only at its start, so its lengths show what
    changed and old blocks need not be compared. The caller reports tables with a replaced block.
    """

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self._manager = manager
        self._sent: dict[str, _SentTable] = {}

    def collect_changes(
        self,
        key_of: Callable[[str], int],
        replaced_req_ids: Collection[str],
        changes: TableChangeLists,
    ) -> None:
        """Adds the tables that changed since the last call to `changes`.

        Args:
            key_of: Returns the key of a request id.
            replaced_req_ids: Requests in whose tables a block was replaced since the last call.
        """
        tables, skipped = self._sent, self._manager.num_skipped_blocks
        group_id, req_to_blocks = self._manager.kv_cache_group_id, self._manager.req_to_blocks
        rows = changes.rows
        for req_id in [req_id for req_id in tables if req_id not in req_to_blocks]:
            rows += (tables.pop(req_id).key, group_id, 0, 0, 0)
        for req_id, blocks in req_to_blocks.items():
            sent = tables.get(req_id)
            num_blocks = len(blocks)
            num_skipped = skipped.get(req_id, 0) if skipped else 0
            if sent is None or sent.blocks is not blocks or req_id in replaced_req_ids:
                key = key_of(req_id)
                if sent is not None and sent.key != key:  # a new request has the same id
                    rows += (sent.key, group_id, 0, 0, 0)
                sent = tables[req_id] = _SentTable(key, blocks)
                num_kept = num_skipped
            elif num_blocks == sent.num_blocks and num_skipped == sent.num_skipped:
                continue
            else:
                num_kept = max(sent.num_blocks, num_skipped)
            sent.num_blocks, sent.num_skipped = num_blocks, num_skipped
            rows += (sent.key, group_id, num_skipped, num_kept, num_blocks - num_kept)
            changes.new_blocks += blocks[num_kept:]

    def reset(self) -> None:
        """Makes the next call of `collect_changes` add all tables."""
        self._sent.clear()
