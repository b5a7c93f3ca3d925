"""Full attention: a hit is the longest unbroken run of cached blocks from the start."""

import types

import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec
from paxkv.errors import InvariantError
from paxkv.kv_cache.block_pool import BlockPool
from paxkv.kv_cache.full_attention import FullAttentionManager

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
HASHES = [b"a", b"b", b"c"]


def make_manager(num_blocks=10, group_id=0):
    pool = BlockPool(num_blocks=num_blocks, enable_caching=True)
    return FullAttentionManager(kv_cache_spec=SPEC, block_pool=pool, kv_cache_group_id=group_id)


def request(request_id, block_hashes=HASHES):
    return types.SimpleNamespace(request_id=request_id, block_hashes=block_hashes)


def hit_ids(manager, max_length, block_hashes=HASHES, group_ids=(0,)):
    hits = FullAttentionManager.find_longest_cache_hit(
        block_hashes=block_hashes,
        max_length=max_length,
        kv_cache_group_ids=group_ids,
        block_pool=manager.block_pool,
        kv_cache_spec=SPEC,
    )
    return tuple([block.block_id for block in group] for group in hits)


def test_hit_is_whole_blocks_within_max_length():
    manager = make_manager()
    manager.allocate_new_blocks("r", 12)
    manager.cache_blocks(request("r"), 12)
    assert hit_ids(manager, 12) == ([1, 2, 3],)
    assert hit_ids(manager, 11) == ([1, 2],)
    assert hit_ids(manager, 3) == ([],)
    assert hit_ids(manager, 100) == ([1, 2, 3],)


def test_a_gap_ends_the_hit():
    manager = make_manager()
    blocks = manager.allocate_new_blocks("r", 12)
    manager.cache_blocks(request("r"), 12)
    manager.block_pool.evict([blocks[1]])
    assert hit_ids(manager, 12) == ([1],)


def test_a_hit_of_several_groups_is_as_long_as_the_shortest():
    first = make_manager()
    second = FullAttentionManager(
        kv_cache_spec=SPEC, block_pool=first.block_pool, kv_cache_group_id=1
    )
    first.allocate_new_blocks("r", 12)
    second.allocate_new_blocks("r", 12)
    first.cache_blocks(request("r"), 12)
    second.cache_blocks(request("r"), 8)
    assert hit_ids(first, 12, group_ids=(0, 1)) == ([1, 2], [4, 5])


def test_blocks_are_cached_once_as_tokens_fill_them():
    manager = make_manager()
    manager.allocate_new_blocks("r", 12)
    for num_tokens, num_hits in ((3, 0), (4, 1), (7, 1), (11, 2), (12, 3), (12, 3)):
        manager.cache_blocks(request("r"), num_tokens)
        assert len(hit_ids(manager, 12)[0]) == num_hits


def test_a_free_hit_needs_a_block_and_a_held_one_does_not():
    manager = make_manager()
    blocks = manager.allocate_new_blocks("r", 8)
    # 13 tokens are 4 blocks; 2 are hits, held by "r".
    assert manager.get_num_blocks_to_allocate("s", 13, blocks) == 2
    manager.free("r", 8)
    assert manager.get_num_blocks_to_allocate("s", 13, blocks) == 4
    assert manager.get_num_blocks_to_allocate("s", 13, []) == 4


def test_room_is_allocated_only_where_it_is_missing():
    manager = make_manager()
    assert [b.block_id for b in manager.allocate_new_blocks("r", 5)] == [1, 2]
    assert manager.get_num_blocks_to_allocate("r", 8, ()) == 0
    assert manager.allocate_new_blocks("r", 8) == ()
    assert [b.block_id for b in manager.allocate_new_blocks("r", 9)] == [3]
    assert [b.block_id for b in manager.get_blocks("r")] == [1, 2, 3]


def test_hits_cannot_join_a_block_table_that_exists():
    manager = make_manager()
    blocks = manager.allocate_new_blocks("r", 4)
    with pytest.raises(InvariantError, match="holds blocks already"):
        manager.allocate_new_computed_blocks("r", blocks)


def test_freed_tail_is_evicted_before_prefix():
    manager = make_manager(num_blocks=4)
    manager.allocate_new_blocks("r", 12)
    manager.cache_blocks(request("r"), 12)
    manager.free("r", 12)
    manager.free("r", 12)  # it has none left: nothing happens
    for num_left in (2, 1, 0):
        manager.block_pool.get_new_blocks(1)
        assert len(hit_ids(manager, 12)[0]) == num_left


def test_blocks_never_written_leave_the_cache_when_freed():
    manager = make_manager()
    manager.allocate_new_blocks("r", 12)
    manager.cache_blocks(request("r"), 12)
    # Tokens 0..6 were written: block 0 is whole, block 1 is not.
    manager.free("r", 7)
    assert hit_ids(manager, 12) == ([1],)
    manager.block_pool.check_invariants()


def test_common_prefix_is_what_every_request_holds():
    manager = make_manager()
    manager.allocate_new_blocks("r", 12)
    shared = manager.get_blocks("r")[:2]
    assert manager.get_num_common_prefix_blocks("r") == 3
    manager.allocate_new_computed_blocks("s", shared)
    manager.allocate_new_blocks("s", 12)
    assert manager.get_num_common_prefix_blocks("r") == 2
    manager.allocate_new_blocks("t", 4)
    assert manager.get_num_common_prefix_blocks("s") == 0
    assert manager.get_num_common_prefix_blocks("unknown") == 0
