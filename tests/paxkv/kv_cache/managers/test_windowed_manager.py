"""Managers that free blocks early: the search for a hit, and the blocks of a whole sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from paxkv.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from paxkv.kv_cache.managers.sliding_window import SlidingWindowManager
from paxkv.kv_cache.managers.windowed_manager import WindowedManager
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    chunked,
    count_slots_block_by_block,
    finish_step,
    full,
    ids,
    make_group,
    make_manager,
    run_alone,
    table,
    window,
)

NUM_BLOCKS = 10
HASHES = [bytes([65 + i]) for i in range(NUM_BLOCKS)]


def first_token_seen(kind, size, position):
    """First position whose K and V the token at `position` reads."""
    if kind == "window":
        return max(position - size + 1, 0)
    return position - position % size


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["window", "chunk"]),
    size=st.integers(1, 14),
    block_size=st.integers(1, 4),
    alignment=st.integers(1, 3),
    cached=st.sets(st.integers(0, NUM_BLOCKS - 1)),
    max_length=st.integers(0, 40),
    use_eagle=st.booleans(),
)
def test_the_hit_is_the_longest_with_all_blocks_that_the_next_token_reads(
    kind, size, block_size, alignment, cached, max_length, use_eagle
):
    manager_class, spec = {
        "window": (SlidingWindowManager, window(size, block_size)),
        "chunk": (ChunkedLocalAttentionManager, chunked(size, block_size)),
    }[kind]
    assert issubclass(manager_class, WindowedManager)
    # A request has a hash for each full block, so a hit never reaches past the last hash.
    max_length = min(max_length, NUM_BLOCKS * block_size)
    pool = BlockPool(num_blocks=NUM_BLOCKS + 1, enable_caching=True)
    for idx in cached:
        key = make_block_hash_with_group_id(HASHES[idx], 0)
        pool.cached_block_hash_to_block.insert(key, pool.blocks[idx + 1])
    (found,) = manager_class.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=max_length,
        kv_cache_group_ids=(0,),
        block_pool=pool,
        kv_cache_spec=spec,
        use_eagle=use_eagle,
        alignment_tokens=alignment * block_size,
    )

    def needed(num_blocks):
        end = num_blocks * block_size
        seen = range(first_token_seen(kind, size, end), end)
        idxs = {position // block_size for position in seen}
        # With EAGLE, the next block must be cached too.
        return idxs | ({num_blocks} if use_eagle else set())

    most = min(max_length // block_size, NUM_BLOCKS) - (1 if use_eagle else 0)
    expected = max(
        (n for n in range(1, most + 1) if n % alignment == 0 and needed(n) <= cached), default=0
    )
    assert len(found) == expected
    read = needed(expected) - {expected} if expected else set()
    assert ids(found) == [i + 1 if i in read else 0 for i in range(expected)]


def test_a_hit_needs_the_run_of_blocks_in_every_group():
    pool = BlockPool(num_blocks=30, enable_caching=True)
    for group_id, idxs in ((0, (0, 1, 2, 3)), (1, (0, 1, 3))):
        for idx in idxs:
            key = make_block_hash_with_group_id(HASHES[idx], group_id)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[10 * group_id + idx + 1])
    found = SlidingWindowManager.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=16,
        kv_cache_group_ids=(0, 1),
        block_pool=pool,
        kv_cache_spec=window(9),
        use_eagle=False,
        alignment_tokens=4,
    )
    assert [ids(group) for group in found] == [[1, 2], [11, 12]]


@pytest.mark.parametrize(
    ("num_new_tokens", "num_needed"),
    # Window 9: 8 tokens before the step's own, anywhere in their first block; at most all 25.
    [(1, 4), (4, 4), (8, 5), (100, 25)],
)
def test_a_whole_sequence_needs_blocks_for_a_window_and_a_step(num_new_tokens, num_needed):
    manager = make_group(SlidingWindowManager, window(9), num_blocks=40)
    num_blocks = manager.get_num_blocks_for_full_sequence("r", 100, (), 0, num_new_tokens)
    assert num_blocks == num_needed


def test_a_long_prompt_with_a_small_window_fits_a_small_pool():
    # 25 blocks of a full group would not fit; 5 of a window do.
    manager = make_manager(window(9), num_blocks=6, max_model_len=200)
    request = FakeRequest("r", range(100))
    assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) is not None
    for num_computed in range(8, 96, 8):
        request.num_computed_tokens = num_computed
        assert manager.allocate_slots(request, 8) is not None
    manager.check_invariants()


def test_blocks_that_left_the_window_stay_freed_if_the_request_does_not_fit():
    manager = make_manager(full(), window(5), num_blocks=13)
    request = run_alone(manager, "r", range(16))
    other = run_alone(manager, "other", range(50, 54))
    request.all_token_ids += range(12)
    # Three new blocks in each group, and 2 are free; with the blocks that left the window, 5.
    assert manager.block_pool.get_num_free_blocks() == 2
    assert manager.allocate_slots(request, 12) is None
    assert table(manager, request, 1)[:3] == [0, 0, 0]
    assert manager.block_pool.get_num_free_blocks() == 5
    assert table(manager, other) != []
    manager.check_invariants()
    assert manager.allocate_slots(request, 8) is not None


def test_slots_are_counted_if_the_window_moved_past_the_computed_tokens():
    manager = make_manager(window(5), num_blocks=20)
    request = run_alone(manager, "r", range(16))
    request.all_token_ids += range(100, 108)
    manager.allocate_slots(request, 8)
    finish_step(request)
    request.all_token_ids += [1]
    manager.allocate_slots(request, 1)
    # Tokens 20 to 24 are left. The last step was useless: the request had ended at token 9.
    finish_step(request, 9)
    assert [block_id == 0 for block_id in table(manager, request)] == [True] * 5 + [False] * 2
    assert (
        manager.count_slots([request]) == (8, 0) == count_slots_block_by_block(manager, [request])
    )
