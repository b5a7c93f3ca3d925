"""Only what changed of a block table is told."""

from paxkv.inspector.block_tables import SentTables
from paxkv.kv_cache.block_pool import BlockPool
from paxkv.kv_cache.full_attention import FullAttentionManager
from tests.paxkv.scheduler.stepping import FULL


def test_growing_tells_new_blocks_and_freeing_tells_an_empty_table():
    pool = BlockPool(num_blocks=20, enable_caching=True)
    manager = FullAttentionManager(kv_cache_spec=FULL, block_pool=pool, kv_cache_group_id=0)
    sent = SentTables(manager)

    def changes(*, has_freed):
        found, holders = sent.take_changes({"a": 1, "b": 2}.get, has_freed=has_freed)
        return {c.key: (c.num_kept, len(c.new_block_ids) // 4) for c in found}, holders

    manager.allocate_new_blocks("a", 9, 9)
    manager.allocate_new_blocks("b", 4, 4)
    assert changes(has_freed=False) == ({1: (0, 3), 2: (0, 1)}, {1, 2})
    assert changes(has_freed=False) == ({}, {1, 2})
    manager.allocate_new_blocks("a", 14, 14)
    assert changes(has_freed=False) == ({1: (3, 1)}, {1, 2})
    manager.free("a", 14)
    manager.allocate_new_blocks("b", 8, 8)
    assert changes(has_freed=True) == ({1: (0, 0), 2: (1, 1)}, {2})
    # The other half of a table is replaced: only what comes behind its first block is told.
    manager.req_to_blocks["b"][1:] = pool.get_new_blocks(2)
    assert changes(has_freed=True) == ({2: (1, 2)}, {2})
