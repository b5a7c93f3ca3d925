"""Sliding window: the blocks that a hit needs, and the blocks that a request frees."""

import pytest

from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from paxkv.kv_cache.managers.sliding_window import SlidingWindowManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    finish_step,
    full,
    ids,
    make_group,
    make_manager,
    run_alone,
    table,
    window,
)

HASHES = [bytes([65 + i]) for i in range(8)]


def make(sliding_window, num_blocks=30, block_size=4, **settings):
    spec = window(sliding_window, block_size)
    return make_group(SlidingWindowManager, spec, num_blocks=num_blocks, **settings)


def hit(manager, cached_idxs, max_length, *, use_eagle=False, alignment_tokens=None):
    """Block ids of the hit, 0 for null, if blocks `cached_idxs` of the prompt are cached.

    Block i of the prompt is block i + 1 of the pool.
    """
    pool = manager.block_pool
    for idx in cached_idxs:
        key = make_block_hash_with_group_id(HASHES[idx], 0)
        pool.cached_block_hash_to_block.insert(key, pool.blocks[idx + 1])
    (found,) = SlidingWindowManager.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=max_length,
        kv_cache_group_ids=(0,),
        block_pool=pool,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=use_eagle,
        alignment_tokens=alignment_tokens or manager.block_size,
    )
    return ids(found)


@pytest.mark.parametrize(
    ("sliding_window", "expected"),
    [
        # The next token sees itself and window - 1 tokens before it.
        (1, [0, 0, 0, 0, 0, 0]),
        (2, [0, 0, 0, 0, 0, 6]),
        (5, [0, 0, 0, 0, 0, 6]),
        (6, [0, 0, 0, 0, 5, 6]),
        (9, [0, 0, 0, 0, 5, 6]),
        (10, [0, 0, 0, 4, 5, 6]),
        (100, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_hit_needs_the_blocks_of_its_window(sliding_window, expected):
    assert hit(make(sliding_window), range(6), 27) == expected


def test_the_run_is_searched_from_right_to_left():
    # A hit needs two blocks in a row, such as 5, 6 or 1, 2; the last cached block is alone.
    assert hit(make(9), (0, 1, 4, 5, 7), 32) == [0, 0, 0, 0, 5, 6]
    assert hit(make(9), (0, 1, 3, 5, 7), 32) == [1, 2]
    assert hit(make(9), (1, 2, 5, 7), 32) == [0, 2, 3]


def test_a_short_run_from_position_0_is_a_hit():
    assert hit(make(100), (0, 1, 2, 4, 5), 32) == [1, 2, 3]
    assert hit(make(9), (0, 2, 4), 32) == [1]
    assert hit(make(9), (1, 3, 5), 32) == []


def test_a_hit_is_whole_blocks_within_max_length():
    assert hit(make(5), range(6), 11) == [0, 2]
    assert hit(make(5), range(6), 3) == []
    assert hit(make(5), range(8), 1000) == [0, 0, 0, 0, 0, 0, 0, 8]


def test_with_eagle_one_more_block_must_be_cached_and_is_dropped():
    assert hit(make(9), (2, 3, 4), 32, use_eagle=True) == [0, 0, 3, 4]
    # Without a third block in a row there is nothing to drop.
    assert hit(make(9), (2, 3, 5, 6), 32, use_eagle=True) == []
    assert hit(make(9), (0, 1, 3, 4), 32, use_eagle=True) == [1]
    assert hit(make(9), (0, 3), 32, use_eagle=True) == []
    assert hit(make(1), (5,), 32, use_eagle=True) == [0, 0, 0, 0, 0]


def test_the_end_of_a_hit_is_aligned():
    # Multiples of 8 tokens: a run may end after 2, 4, 6 or 8 blocks.
    assert hit(make(9), (1, 2, 4, 5), 32, alignment_tokens=8) == [0, 0, 0, 0, 5, 6]
    assert hit(make(9), (2, 3, 4), 32, alignment_tokens=8) == [0, 0, 3, 4]
    assert hit(make(9), (1, 2, 3, 4), 20, alignment_tokens=8) == [0, 0, 3, 4]
    assert hit(make(9), (0, 1, 2), 32, alignment_tokens=8) == [1, 2]
    assert hit(make(9), (1, 2), 32, alignment_tokens=8) == []
    # Block 5 is dropped; 3 and 4 end at an aligned position.
    assert hit(make(9), (2, 3, 4), 32, alignment_tokens=8, use_eagle=True) == [0, 0, 3, 4]
    assert hit(make(9), (3, 4, 5), 32, alignment_tokens=8, use_eagle=True) == []


def test_blocks_that_left_the_window_are_freed_and_become_null():
    manager = make(6)
    manager.allocate_new_blocks("r", 16, 16)
    # The token at 10 does not see tokens 0..4, so block 0 is freed; part of block 1 is needed.
    manager.remove_skipped_blocks("r", 10)
    assert ids(manager.get_blocks("r")) == [0, 2, 3, 4]
    manager.remove_skipped_blocks("r", 12)
    assert ids(manager.get_blocks("r")) == [0, 2, 3, 4]
    manager.remove_skipped_blocks("r", 13)
    assert ids(manager.get_blocks("r")) == [0, 0, 3, 4]
    assert manager.num_held_blocks == 2
    manager.check_invariants()


def test_blocks_that_left_the_window_are_reused_newest_first():
    manager = make(2, num_blocks=6)
    manager.allocate_new_blocks("r", 20, 20)
    manager.remove_skipped_blocks("r", 9)
    assert ids(manager.get_blocks("r")) == [0, 0, 3, 4, 5]
    free_ids = ids(manager.block_pool.free_block_queue.get_all_free_blocks())
    assert free_ids == [2, 1]
    manager.free("r", 20)
    assert ids(manager.block_pool.free_block_queue.get_all_free_blocks()) == [2, 1, 5, 4, 3]


def test_freed_blocks_are_not_visited_again():
    manager = make(2, num_blocks=1100)
    manager.allocate_new_blocks("r", 4096, 4096)
    manager.remove_skipped_blocks("r", 4000)

    class Watched(list):
        def __getitem__(self, key):
            assert isinstance(key, slice)
            assert key.stop - key.start <= 2
            return super().__getitem__(key)

    manager.req_to_blocks["r"] = Watched(manager.req_to_blocks["r"])
    for num_computed in range(4001, 4096):
        manager.remove_skipped_blocks("r", num_computed)


def test_a_window_longer_than_the_sequence_frees_nothing():
    manager = make(100)
    manager.allocate_new_blocks("r", 16, 16)
    manager.remove_skipped_blocks("r", 16)
    assert ids(manager.get_blocks("r")) == [1, 2, 3, 4]


def test_a_window_of_1_holds_only_the_block_being_written():
    manager = make_manager(window(1), num_blocks=4, enable_caching=False)
    request = FakeRequest("r", range(9))
    assert admit(manager, request, num_new_tokens=8)
    finish_step(request, 8)
    manager.allocate_slots(request, 1)
    assert table(manager, request) == [0, 0, 3]
    assert manager.block_pool.get_num_free_blocks() == 2
    manager.check_invariants()


def test_a_long_sequence_holds_only_the_blocks_of_its_window():
    # Window 512 of 16-token blocks: 32 blocks of the window and one being written.
    manager = make_manager(window(512, 16), num_blocks=300, max_model_len=5000, hash_block_size=16)
    request = FakeRequest("r", range(4096), hash_block_size=16)
    most = 0
    for _ in range(4096 // 64):
        assert manager.allocate_slots(request, 64) is not None
        request.num_computed_tokens += 64
        most = max(most, manager.coordinator.single_type_managers[0].num_held_blocks)
    request.all_token_ids.append(0)
    manager.allocate_slots(request, 1)
    assert manager.coordinator.single_type_managers[0].num_held_blocks == 33
    # 511 tokens before a step of 64: at most 36 blocks, and one as they may start in a block.
    assert most <= 37
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 299


def test_hits_left_of_the_window_are_not_held():
    manager = make_manager(full(), window(6))
    first = run_alone(manager, "first", range(16))
    second = FakeRequest("second", range(17))
    assert admit(manager, second)
    assert second.num_computed_tokens == 16
    assert table(manager, second, 0)[:4] == table(manager, first, 0)
    assert table(manager, second, 1)[:4] == [0, 0, *table(manager, first, 1)[2:]]
    manager.check_invariants()


def test_external_tokens_outside_the_window_get_no_blocks():
    # The token at 16 sees 11..16: blocks 2, 3 and its own, which are all blocks of the pool.
    manager = make_manager(window(6), num_blocks=4)
    request = FakeRequest("r", range(20))
    assert admit(manager, request, num_new_tokens=1, num_external_computed_tokens=16)
    assert table(manager, request) == [0, 0, 1, 2, 3]
    assert manager.block_pool.get_num_free_blocks() == 0
    manager.check_invariants()


def test_external_tokens_push_local_hits_out_of_the_window():
    manager = make_manager(window(6), num_blocks=4)
    first = run_alone(manager, "first", range(12))
    manager.free(first)
    request = FakeRequest("r", [*range(12), *range(50, 62)])
    hits, num_hits = manager.get_computed_blocks(request)
    assert (hits.get_block_ids(), num_hits) == (([0, 2, 3],), 12)
    # 20 tokens are computed. The token at 20 sees 15..20, so no hit is held, and the three
    # blocks of the pool suffice.
    assert manager.allocate_slots(request, 4, 12, hits, num_external_computed_tokens=8) is not None
    assert table(manager, request)[:3] == [0, 0, 0]
    assert sorted(table(manager, request)[3:]) == [1, 2, 3]
    manager.check_invariants()


def test_a_fork_fails_if_one_source_block_left_the_window():
    manager = make(6)
    manager.allocate_new_blocks("r", 16, 16)
    manager.remove_skipped_blocks("r", 14)
    assert ids(manager.get_blocks("r")) == [0, 0, 3, 4]
    assert ids(manager.get_blocks_to_fork("r", 14, 14, is_final=False)) == [0, 0, 3, 4]
    assert ids(manager.get_blocks_to_fork("r", 13, 14, is_final=False)) == [0, 0, 3, 4]
    # The token at 12 sees 7..12, and block 1 was freed.
    assert manager.get_blocks_to_fork("r", 12, 14, is_final=False) is None


def test_max_tokens_before_allocate_ends_before_a_block_leaves_the_window():
    manager = make(6, enable_caching=False)
    manager.allocate_new_blocks("r", 16, 16)
    # With 9 computed tokens, block 0 has left the window. With fewer, no block leaves.
    assert manager.get_max_tokens_before_allocate("r") == 9
    manager.remove_skipped_blocks("r", 9)
    assert manager.get_max_tokens_before_allocate("r") == 13
    manager.remove_skipped_blocks("r", 13)
    assert manager.get_max_tokens_before_allocate("r") == 16
