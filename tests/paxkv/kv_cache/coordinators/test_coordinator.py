"""Coordinators: every call applies to all groups, over one pool."""

import types

import pytest

from paxkv.kv_cache.coordinators.coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    copies,
    cross,
    finish_step,
    full,
    ids,
    make_config,
    make_manager,
    state,
    states,
    window,
)


def group_ids(blocks):
    return tuple(ids(group) for group in blocks)


def plain(*specs, num_blocks=10):
    return KVCacheCoordinatorNoPrefixCache(
        make_config(*specs, num_blocks=num_blocks), enable_caching=False
    )


def unitary(spec, **settings):
    return UnitaryKVCacheCoordinator(make_config(spec), enable_caching=True, **settings)


def num_to_allocate(coordinator, num_tokens, *, num_encoder_tokens=0):
    nothing = tuple(() for _ in coordinator.single_type_managers)
    return coordinator.get_num_blocks_to_allocate(
        "r", num_tokens, nothing, num_encoder_tokens, 0, num_tokens
    )


def new_blocks(coordinator, num_tokens, *, num_encoder_tokens=0):
    return coordinator.allocate_new_blocks("r", num_tokens, num_encoder_tokens, 0, num_tokens)


def hashed(block_hashes):
    return types.SimpleNamespace(request_id="r", block_hashes=block_hashes)


def test_groups_get_different_blocks_of_one_pool():
    coordinator = plain(full(), full(), full())
    assert num_to_allocate(coordinator, 5) == 6
    assert group_ids(new_blocks(coordinator, 5)) == ([1, 2], [3, 4], [5, 6])
    assert num_to_allocate(coordinator, 9) == 3
    assert group_ids(new_blocks(coordinator, 9)) == ([7], [8], [9])
    assert group_ids(coordinator.get_blocks("r")) == ([1, 2, 7], [3, 4, 8], [5, 6, 9])
    assert coordinator.block_pool.get_num_free_blocks() == 0
    coordinator.free("r", 9)
    assert coordinator.block_pool.get_num_free_blocks() == 9
    assert group_ids(coordinator.get_blocks("r")) == ([], [], [])


def test_blocks_are_freed_in_reverse_group_by_group():
    coordinator = plain(full(), full(), num_blocks=7)
    new_blocks(coordinator, 9)
    coordinator.free("r", 9)
    free_blocks = coordinator.block_pool.free_block_queue.get_all_free_blocks()
    assert ids(free_blocks) == [3, 2, 1, 6, 5, 4]


def test_groups_may_have_blocks_of_different_sizes():
    coordinator = plain(full(4), window(100, block_size=8), states(2))
    assert num_to_allocate(coordinator, 17) == 5 + 3 + 6
    coordinator = plain(full(4), full(8))
    assert group_ids(new_blocks(coordinator, 9)) == ([1, 2, 3], [4, 5])


def test_cross_attention_counts_encoder_tokens():
    coordinator = plain(cross(), full())
    assert num_to_allocate(coordinator, 5, num_encoder_tokens=9) == 3 + 2
    assert group_ids(new_blocks(coordinator, 5, num_encoder_tokens=9)) == ([1, 2, 3], [4, 5])
    nothing = ((), ())
    assert coordinator.get_num_blocks_for_full_sequence("s", 40, nothing, 9, 0, 4) == 3 + 10


def test_without_prefix_caching_there_are_no_hits():
    coordinator = plain(full())
    new_blocks(coordinator, 4)
    coordinator.cache_blocks(hashed([b"a"]), 4)
    assert coordinator.find_longest_cache_hit([b"a"], 100) == (((),), 0)
    coordinator.block_pool.check_invariants()


def test_unitary_hit_counts_its_tokens():
    coordinator = unitary(full())
    new_blocks(coordinator, 8)
    coordinator.cache_blocks(hashed([b"a", b"b"]), 8)
    blocks, num_tokens = coordinator.find_longest_cache_hit([b"a", b"b", b"c"], 100)
    assert (group_ids(blocks), num_tokens) == (([1, 2],), 8)
    assert coordinator.get_num_common_prefix_blocks("r") == [2]


def test_a_hash_may_cover_fewer_tokens_than_a_block():
    # Each hash covers 2 tokens: every second hash identifies a block of 4.
    coordinator = UnitaryKVCacheCoordinator(
        make_config(full(), hash_block_size=2), enable_caching=True
    )
    new_blocks(coordinator, 8)
    coordinator.cache_blocks(hashed([b"0", b"1", b"2", b"3"]), 8)
    blocks, num_tokens = coordinator.find_longest_cache_hit([b"x", b"1", b"y", b"3", b"z"], 100)
    assert (group_ids(blocks), num_tokens) == (([1, 2],), 8)
    assert coordinator.find_longest_cache_hit([b"0", b"x"], 100)[1] == 0


def test_with_eagle_a_hit_is_one_block_shorter():
    coordinator = unitary(full(), use_eagle=True)
    new_blocks(coordinator, 8)
    coordinator.cache_blocks(hashed([b"a", b"b"]), 8)
    assert coordinator.find_longest_cache_hit([b"a", b"b"], 100)[1] == 4


def test_tokens_before_allocate_are_the_minimum_of_all_groups():
    coordinator = plain(full(4), full(8))
    new_blocks(coordinator, 3)
    assert coordinator.get_max_tokens_before_allocate("r") == 4


@pytest.mark.parametrize("enable_caching", [True, False])
def test_slots_of_a_burst_are_reserved_after_the_steps_slots(enable_caching):
    manager = make_manager(full(), window(5), full(8), enable_caching=enable_caching)
    request = FakeRequest("r", range(8))
    admit(manager, request, 7)
    finish_step(request, 7)
    # The last known token fills blocks, which are cached from now on.
    assert manager.allocate_slots(request, 1).is_empty()
    before = state(manager)
    tables = manager.get_block_ids("r")
    assert manager.get_num_blocks_to_reserve(request, 8) == 0
    assert manager.reserve_slots(request, 8).is_empty()
    assert state(manager) == before
    # 15 tokens need 4 blocks of 4, and 2 of 8.
    assert manager.get_num_blocks_to_reserve(request, 15) == 2 + 2 + 1
    new = manager.reserve_slots(request, 15).get_block_ids()
    assert [len(group) for group in new] == [2, 2, 1]
    assert manager.get_block_ids("r") == tuple(map(list.__add__, tables, new))
    assert copies(manager) == []
    assert manager.get_num_blocks_to_reserve(request, 15) == 0
    hit = manager.get_computed_blocks(FakeRequest("s", range(20)))[1]
    assert hit == (8 if enable_caching else 0)
    manager.check_invariants()
