"""Full attention: a hit is the longest unbroken run of cached blocks from the start."""

import pytest

from paxkv.errors import InvariantError
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from tests.paxkv.kv_cache.cache_fakes import full, ids, make_group

HASHES = [b"a", b"b", b"c"]


class Hashed:
    """A request that has only hashes."""

    def __init__(self, request_id, block_hashes=HASHES):
        self.request_id = request_id
        self.block_hashes = block_hashes


def make(num_blocks=10, **settings):
    return make_group(FullAttentionManager, full(), num_blocks=num_blocks, **settings)


def new_blocks(manager, request_id, num_tokens):
    return manager.allocate_new_blocks(request_id, num_tokens, num_tokens)


def num_to_allocate(manager, request_id, num_tokens, hits=()):
    num_computed = len(hits) * manager.block_size
    return manager.get_num_blocks_to_allocate(
        request_id, num_tokens, hits, num_computed, num_tokens
    )


def hit_ids(manager, max_length, *, group_ids=(0,), use_eagle=False, alignment_tokens=4):
    hits = FullAttentionManager.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=max_length,
        kv_cache_group_ids=group_ids,
        block_pool=manager.block_pool,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=use_eagle,
        alignment_tokens=alignment_tokens,
    )
    return tuple(ids(group) for group in hits)


def cached_blocks(manager, request_id="r", num_tokens=12):
    blocks = new_blocks(manager, request_id, num_tokens)
    manager.cache_blocks(Hashed(request_id), num_tokens)
    return blocks


def test_hit_is_whole_blocks_within_max_length():
    manager = make()
    cached_blocks(manager)
    assert hit_ids(manager, 12) == ([1, 2, 3],)
    assert hit_ids(manager, 11) == ([1, 2],)
    assert hit_ids(manager, 3) == ([],)
    assert hit_ids(manager, 100) == ([1, 2, 3],)


def test_a_gap_ends_the_hit():
    manager = make()
    blocks = cached_blocks(manager)
    manager.block_pool.evict([blocks[1]])
    assert hit_ids(manager, 12) == ([1],)


def test_a_hit_of_several_groups_is_as_long_as_the_shortest():
    first = make()
    second = FullAttentionManager(
        kv_cache_spec=full(), block_pool=first.block_pool, kv_cache_group_id=1
    )
    cached_blocks(first)
    new_blocks(second, "r", 12)
    second.cache_blocks(Hashed("r"), 8)
    assert hit_ids(first, 12, group_ids=(0, 1)) == ([1, 2], [4, 5])


def test_with_eagle_the_last_hit_block_is_dropped():
    manager = make()
    cached_blocks(manager)
    assert hit_ids(manager, 12, use_eagle=True) == ([1, 2],)
    assert hit_ids(manager, 7, use_eagle=True) == ([],)
    assert hit_ids(manager, 3, use_eagle=True) == ([],)


def test_a_hit_is_a_multiple_of_the_alignment():
    manager = make()
    cached_blocks(manager)
    assert hit_ids(manager, 12, alignment_tokens=8) == ([1, 2],)
    assert hit_ids(manager, 12, alignment_tokens=12) == ([1, 2, 3],)
    assert hit_ids(manager, 12, alignment_tokens=16) == ([],)
    # The dropped block need not be aligned, but the rest must be.
    assert hit_ids(manager, 12, alignment_tokens=8, use_eagle=True) == ([1, 2],)
    assert hit_ids(manager, 8, alignment_tokens=8, use_eagle=True) == ([],)


def test_each_block_is_cached_once_when_it_is_full():
    manager = make()
    new_blocks(manager, "r", 12)
    for num_tokens, num_hits in ((3, 0), (4, 1), (7, 1), (11, 2), (12, 3), (12, 3)):
        manager.cache_blocks(Hashed("r"), num_tokens)
        assert len(hit_ids(manager, 12)[0]) == num_hits


def test_a_free_hit_needs_a_block_and_a_held_one_does_not():
    manager = make()
    blocks = cached_blocks(manager, num_tokens=8)
    # 13 tokens are 4 blocks; 2 are hits, held by "r".
    assert num_to_allocate(manager, "s", 13, blocks) == 2
    manager.free("r", 8)
    assert num_to_allocate(manager, "s", 13, blocks) == 4
    assert num_to_allocate(manager, "s", 13) == 4


def test_only_missing_blocks_are_allocated():
    manager = make()
    assert ids(new_blocks(manager, "r", 5)) == [1, 2]
    assert num_to_allocate(manager, "r", 8) == 0
    assert new_blocks(manager, "r", 8) == ()
    assert ids(new_blocks(manager, "r", 9)) == [3]
    assert ids(manager.get_blocks("r")) == [1, 2, 3]
    # After rejected drafts, the request has more slots than it needs.
    assert num_to_allocate(manager, "r", 5) == 0
    assert new_blocks(manager, "r", 5) == ()


def test_hits_for_an_existing_block_table_raise():
    manager = make()
    blocks = new_blocks(manager, "r", 4)
    with pytest.raises(InvariantError, match="holds blocks already"):
        manager.allocate_new_computed_blocks("r", blocks, 4, 0)


def test_freed_tail_is_evicted_before_prefix():
    manager = make(num_blocks=4)
    cached_blocks(manager)
    manager.free("r", 12)
    manager.free("r", 12)  # it holds no blocks, so this does nothing
    for num_left in (2, 1, 0):
        manager.block_pool.get_new_blocks(1)
        assert len(hit_ids(manager, 12)[0]) == num_left


def test_freed_blocks_that_were_never_written_leave_the_cache():
    manager = make()
    cached_blocks(manager)
    # Tokens 0..6 were written: block 0 is full, block 1 is not.
    manager.free("r", 7)
    assert hit_ids(manager, 12) == ([1],)
    manager.block_pool.check_invariants()


def test_the_common_prefix_is_the_blocks_that_every_request_holds():
    manager = make()
    new_blocks(manager, "r", 12)
    shared = manager.get_blocks("r")[:2]
    assert manager.get_num_common_prefix_blocks("r") == 3
    manager.allocate_new_computed_blocks("s", shared, 8, 0)
    new_blocks(manager, "s", 12)
    assert manager.get_num_common_prefix_blocks("r") == 2
    new_blocks(manager, "t", 4)
    assert manager.get_num_common_prefix_blocks("s") == 0
    assert manager.get_num_common_prefix_blocks("unknown") == 0


def test_shared_blocks_after_an_unshared_block_are_not_in_the_common_prefix():
    manager = make()
    own, shared = new_blocks(manager, "r", 8)
    (equal,) = new_blocks(manager, "gone", 4)
    manager.allocate_new_computed_blocks("s", [equal, shared], 8, 0)
    manager.free("gone", 4)
    assert (own.ref_cnt, equal.ref_cnt, shared.ref_cnt) == (1, 1, 2)
    assert manager.get_num_common_prefix_blocks("r") == 0
