"""Hybrid coordinator: the longest hit after which every kind of group can continue."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.kv_cache.coordinators.hybrid_coordinator import HybridKVCacheCoordinator
from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from tests.paxkv.kv_cache.cache_fakes import chunked, full, ids, make_config, window

NUM_TOKENS = 48
HASHES = [bytes([65 + i]) for i in range(NUM_TOKENS // 2)]  # of 2 tokens each


def make(*specs, cached, use_eagle=False):
    """A coordinator in which blocks `cached[group]` of the prompt are cached.

    Block i of the prompt is block `100 * group + i + 1` of the pool.
    """
    coordinator = HybridKVCacheCoordinator(
        make_config(*specs, num_blocks=100 * len(specs) + 1, hash_block_size=2),
        enable_caching=True,
        use_eagle=use_eagle,
    )
    pool = coordinator.block_pool
    for group_id, (spec, idxs) in enumerate(zip(specs, cached, strict=True)):
        for idx in idxs:
            block_hash = HASHES[(idx + 1) * spec.block_size // 2 - 1]
            key = make_block_hash_with_group_id(block_hash, group_id)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[100 * group_id + idx + 1])
    return coordinator


def find(coordinator, max_length=NUM_TOKENS):
    blocks, num_tokens = coordinator.find_longest_cache_hit(HASHES, max_length)
    return [ids(group) for group in blocks], num_tokens


def test_equal_groups_are_merged_and_full_attention_comes_first():
    coordinator = make(window(8), full(), window(8), full(8), full(), cached=[()] * 5)
    assert [groups.group_ids for groups in coordinator.equal_groups] == [(1, 4), (3,), (0, 2)]
    assert coordinator.lcm_block_size == 8


def test_a_hit_needs_blocks_of_every_group():
    coordinator = make(full(), window(5), cached=[range(5), (1, 2)])
    # The window of 5 needs only the last block, which is cached at 12 tokens, but not at 16 and 20.
    assert find(coordinator) == ([[1, 2, 3], [0, 0, 103]], 12)


def test_groups_with_equal_specs_have_hits_of_equal_length():
    coordinator = make(full(), full(), cached=[range(5), range(3)])
    assert find(coordinator) == ([[1, 2, 3], [101, 102, 103]], 12)


def test_a_miss_in_one_group_is_a_miss():
    assert find(make(full(), window(5), cached=[range(5), ()])) == ([[], []], 0)
    assert find(make(full(), window(5), cached=[(), range(5)])) == ([[], []], 0)


def test_a_window_searches_again_when_a_later_kind_shortens_the_hit():
    # In one round: full 24, window 24 (block 5), chunks of 16: 16 tokens, as block 4 is missing.
    # But at 16 the window lacks block 3, so all kinds accept 8.
    coordinator = make(full(), window(5), chunked(16), cached=[range(6), (1, 5), (0, 1, 2, 3, 5)])
    assert find(coordinator) == ([[1, 2], [0, 102], [201, 202]], 8)


def test_two_windows_shorten_each_other_until_both_agree():
    # The first accepts 28, 20, 12, 4; the second 24, 16, 8. No length is common.
    coordinator = make(window(5), window(4), cached=[(6, 4, 2, 0), (5, 3, 1)])
    assert find(coordinator) == ([[], []], 0)
    coordinator = make(window(5), window(4), cached=[(6, 4, 2, 0), (5, 3, 1, 0)])
    assert find(coordinator) == ([[1], [101]], 4)


def test_a_window_before_full_attention_in_the_config_makes_no_difference():
    # If the window were searched last and only once, 24 would be a hit of full attention.
    coordinator = make(window(9), full(), cached=[(1, 2, 4, 5), range(4)])
    assert find(coordinator) == ([[0, 2, 3], [101, 102, 103]], 12)


def test_hits_end_at_a_block_boundary_of_every_group():
    # Blocks of 4 and 6: a hit is a multiple of 12.
    coordinator = make(full(4), full(6), cached=[range(9), range(5)])
    assert find(coordinator) == ([[1, 2, 3, 4, 5, 6], [101, 102, 103, 104]], 24)
    coordinator = make(full(4), window(7, 8), cached=[range(9), (0, 1, 3)])
    assert find(coordinator) == ([[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 104]], 32)
    assert find(coordinator, 31) == ([[1, 2, 3, 4], [0, 102]], 16)


def test_with_eagle_only_one_block_is_dropped_for_all_kinds():
    coordinator = make(full(), window(5), cached=[range(5), range(5)], use_eagle=True)
    assert find(coordinator) == ([[1, 2, 3, 4], [0, 0, 0, 104]], 16)
    coordinator = make(
        full(), window(5), window(9), cached=[range(5), range(5), range(5)], use_eagle=True
    )
    assert find(coordinator) == ([[1, 2, 3, 4], [0, 0, 0, 104], [0, 0, 203, 204]], 16)


def test_with_eagle_every_group_must_have_the_dropped_block():
    coordinator = make(full(), window(5), cached=[range(5), (0, 1, 2)], use_eagle=True)
    assert find(coordinator) == ([[1, 2], [0, 102]], 8)
    coordinator = make(full(), window(5), cached=[range(3), (1, 2, 3, 4)], use_eagle=True)
    assert find(coordinator) == ([[1, 2], [0, 102]], 8)
    # The dropped block must not exceed the largest length either.
    coordinator = make(full(), window(5), cached=[range(5), range(5)], use_eagle=True)
    assert find(coordinator, 19)[1] == 12


def first_seen(spec, position):
    """First position that the token at `position` reads in a layer of this kind."""
    if chunk_size := getattr(spec, "attention_chunk_size", None):
        return position - position % chunk_size
    if sliding_window := getattr(spec, "sliding_window", None):
        return max(position - sliding_window + 1, 0)
    return 0


SPECS = st.sampled_from(
    [full(2), full(4), full(6), window(3, 2), window(8, 4), window(1, 2), window(100, 4)]
    + [chunked(4, 2), chunked(12, 4)]
)


@settings(max_examples=100)
@given(data=st.data(), use_eagle=st.booleans(), max_length=st.integers(0, NUM_TOKENS))
def test_the_hit_is_the_longest_that_all_kinds_accept(data, use_eagle, max_length):
    specs = data.draw(st.lists(SPECS, min_size=2, max_size=4))
    cached = []
    for spec in specs:
        num_blocks = NUM_TOKENS // spec.block_size
        missing = data.draw(st.sets(st.integers(0, num_blocks - 1), max_size=3))
        cached.append(set(range(num_blocks)) - missing)
    blocks, num_tokens = find(make(*specs, cached=cached, use_eagle=use_eagle), max_length)

    def needed(spec, length):
        return {p // spec.block_size for p in range(first_seen(spec, length), length)}

    def accepts(spec, idxs, length):
        if length % spec.block_size or not needed(spec, length) <= idxs:
            return False
        if not use_eagle:
            return True
        has_next = hasattr(spec, "shapes") or length // spec.block_size in idxs
        return has_next and length + spec.block_size <= max_length

    expected = max(
        length
        for length in range(max_length + 1)
        if length == 0
        or all(accepts(spec, idxs, length) for spec, idxs in zip(specs, cached, strict=True))
    )
    assert num_tokens == expected
    for group_id, (spec, found) in enumerate(zip(specs, blocks, strict=True)):
        read = needed(spec, expected)
        assert found == [
            100 * group_id + i + 1 if i in read else 0 for i in range(expected // spec.block_size)
        ]


@pytest.mark.parametrize("max_length", [0, 1, 3])
def test_a_prompt_shorter_than_a_block_hits_nothing(max_length):
    coordinator = make(full(), window(5), cached=[range(5), range(5)])
    assert find(coordinator, max_length) == ([[], []], 0)
