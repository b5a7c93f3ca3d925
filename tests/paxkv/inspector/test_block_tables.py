"""Frames contain only the changes of block tables."""

from paxkv.inspector.block_tables import SentTables, TableChangeLists
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from paxkv.kv_cache.observers.block_changes import BlockChangeLog
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.paxkv.inspector.inspected_pool import table_rows_of
from tests.paxkv.scheduler.stepping import FULL


def test_changes_are_new_blocks_freed_tables_and_replaced_tables():
    pool = BlockPool(num_blocks=20, enable_caching=True)
    manager = FullAttentionManager(kv_cache_spec=FULL, block_pool=pool, kv_cache_group_id=0)
    sent = SentTables(manager)
    keys = {"a": 1, "b": 2}

    def changes(replaced=()):
        lists = TableChangeLists()
        sent.collect_changes(keys.get, replaced, lists)
        rows = table_rows_of(lists.encode())
        for key, _, _, num_kept, new in rows:
            if new:
                table = manager.get_blocks("ab"[(key - 1) % 2])
                assert [block.block_id for block in table[num_kept:]] == new
        return [(key, num_kept, len(new)) for key, _, _, num_kept, new in rows]

    manager.allocate_new_blocks("a", 9, 9)
    manager.allocate_new_blocks("b", 4, 4)
    assert changes() == [(1, 0, 3), (2, 0, 1)]
    assert changes() == []
    manager.allocate_new_blocks("a", 14, 14)
    assert changes() == [(1, 3, 1)]
    manager.free("a", 14)
    manager.allocate_new_blocks("b", 8, 8)
    assert changes() == [(1, 0, 0), (2, 1, 1)]
    # A block in the middle is replaced, so the whole table is sent.
    log = BlockChangeLog(pool.blocks)
    pool.add_observer(log)
    pool.touch(manager.get_blocks("b")[:1])
    manager.replace_shared_blocks("b", 2, 6)
    assert log.replaced_req_ids == {"b"}
    assert changes(log.replaced_req_ids) == [(2, 0, 2)]
    # Freed and filled again between two calls, by the same request and by one with the same id.
    manager.free("b", 8)
    manager.allocate_new_blocks("b", 8, 8)
    assert changes() == [(2, 0, 2)]
    manager.free("b", 8)
    manager.allocate_new_blocks("b", 4, 4)
    keys["b"] = 4
    assert changes() == [(2, 0, 0), (4, 0, 1)]
