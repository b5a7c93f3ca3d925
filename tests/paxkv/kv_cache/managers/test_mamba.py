"""Mamba: one state goes on, states at block boundaries can be found, none is read too early."""

import pytest

from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from paxkv.kv_cache.managers.mamba import MambaManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    copies,
    finish_step,
    fork,
    full,
    ids,
    make_group,
    make_manager,
    mamba,
    run_alone,
    table,
)

HASHES = [bytes([65 + i]) for i in range(8)]


def make(num_speculative_blocks=0, **settings):
    return make_group(MambaManager, mamba(4, num_speculative_blocks), **settings)


def hit(cached_idxs, max_length, *, use_eagle=False, alignment_tokens=4):
    """Block ids of the hit; block i of the prompt is block i + 1 of the pool, 0 is null."""
    manager = make()
    pool = manager.block_pool
    for idx in cached_idxs:
        key = make_block_hash_with_group_id(HASHES[idx], 0)
        pool.cached_block_hash_to_block.insert(key, pool.blocks[idx + 1])
    (found,) = MambaManager.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=max_length,
        kv_cache_group_ids=(0,),
        block_pool=pool,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=use_eagle,
        alignment_tokens=alignment_tokens,
    )
    return ids(found)


def test_a_hit_is_the_last_cached_state_with_null_blocks_before_it():
    assert hit((0, 2), 32) == [0, 0, 3]
    assert hit((0, 2), 11) == [1]
    assert hit((), 32) == []
    assert hit((0, 2, 3), 32, alignment_tokens=12) == [0, 0, 3]
    assert hit((0, 3), 32, alignment_tokens=12) == []


def test_with_eagle_a_block_of_tokens_is_left_to_compute():
    assert hit((2, 3), 16, use_eagle=True) == [0, 0, 3]
    assert hit((3,), 16, use_eagle=True) == []
    assert hit((3,), 20, use_eagle=True) == [0, 0, 0, 4]


def test_a_step_gets_a_block_per_boundary_and_the_next_keeps_the_last():
    manager = make_manager(mamba())
    request = FakeRequest("r", range(10))
    admit(manager, request)
    assert table(manager, request) == [1, 2, 3]
    finish_step(request)
    request.all_token_ids.append(0)
    manager.allocate_slots(request, 1)
    assert table(manager, request) == [0, 0, 3]
    finish_step(request)
    # The state after 12 tokens is in block 2 of the table; the one after 13 goes to a new one.
    request.all_token_ids += [0, 0]
    manager.allocate_slots(request, 2)
    assert table(manager, request) == [0, 0, 3, 4]
    manager.check_invariants()


def test_a_state_at_a_boundary_stays_until_it_was_read():
    manager = make()
    manager.allocate_new_blocks("r", 12, 12)
    manager.remove_skipped_blocks("r", 8)
    assert ids(manager.get_blocks("r")) == [0, 2, 3]
    manager.remove_skipped_blocks("r", 9)
    assert ids(manager.get_blocks("r")) == [0, 0, 3]


def test_states_that_were_given_up_can_still_be_found():
    manager = make_manager(mamba())
    request = run_alone(manager, "r", range(10))
    request.all_token_ids.append(0)
    manager.allocate_slots(request, 1)
    hits, num_hits = manager.get_computed_blocks(FakeRequest("s", range(8)))
    assert (hits.get_block_ids(), num_hits) == (([1],), 4)
    hits, num_hits = manager.get_computed_blocks(FakeRequest("s", range(9)))
    assert (hits.get_block_ids(), num_hits) == (([0, 2],), 8)
    assert manager.block_pool.blocks[2].ref_cnt == 0


def test_a_hit_state_is_read_and_not_written():
    manager = make_manager(mamba())
    run_alone(manager, "r", range(10))
    other = FakeRequest("s", range(9))
    assert admit(manager, other)
    assert table(manager, other) == [0, 2, 4]
    assert copies(manager) == []
    manager.check_invariants()


def test_a_state_cannot_be_hit_in_the_step_that_writes_it():
    manager = make_manager(full(), mamba())
    assert admit(manager, FakeRequest("first", range(10)))
    second = FakeRequest("second", range(10))
    assert not admit(manager, second)
    # What it would find is in none of its tables: another prompt is admitted in this step.
    assert admit(manager, FakeRequest("other", range(50, 60)))
    manager.drain_block_copies()
    assert admit(manager, second)
    assert second.num_computed_tokens == 8
    manager.check_invariants()


def test_a_state_that_a_step_before_wrote_can_be_hit_as_soon_as_it_is_cached():
    # The last token of a block was on its way while its state was written.
    manager = make_manager(mamba())
    first = FakeRequest("first", range(7))
    assert manager.allocate_slots(first, 8)
    manager.drain_block_copies()
    first.num_computed_tokens = 8
    first.all_token_ids.append(7)
    manager.cache_blocks(first, 8)
    second = FakeRequest("second", range(9))
    assert admit(manager, second)
    assert second.num_computed_tokens == 8


def test_lookahead_takes_no_state():
    manager = make()
    assert manager.get_num_blocks_to_allocate("r", 9, (), 0, 4) == 1
    assert ids(manager.allocate_new_blocks("r", 9, 4)) == [1]
    # The next token's state goes to the next block, whatever is looked ahead.
    assert manager.get_num_blocks_to_allocate("r", 12, (), 4, 5) == 1


def test_speculative_blocks_stand_behind_the_tokens():
    manager = make(num_speculative_blocks=2)
    assert manager.get_num_blocks_to_allocate("r", 5, (), 0, 5) == 4
    assert ids(manager.allocate_new_blocks("r", 5, 5)) == [1, 2, 3, 4]
    assert manager.get_num_blocks_to_allocate("r", 8, (), 5, 8) == 0
    assert manager.get_num_blocks_to_allocate("r", 9, (), 8, 9) == 1
    # The next boundary is at 8: with caching it is work to pass it, though there is room.
    assert manager.get_num_tokens_before_block_work("r") == 3
    plain = make(num_speculative_blocks=2, enable_caching=False)
    plain.allocate_new_blocks("r", 5, 5)
    plain.remove_skipped_blocks("r", 5)
    assert plain.get_num_tokens_before_block_work("r") == 8


def test_a_fork_needs_the_state_after_its_last_shared_token():
    manager = make_manager(mamba())
    source = run_alone(manager, "r", range(10))
    # The state after 10 tokens is there, and that after 8; what was after 9 is overwritten.
    assert manager.get_forked_blocks(source, 9) is None
    assert manager.get_forked_blocks(source, 10).get_block_ids() == ([0, 0, 3],)
    assert manager.get_forked_blocks(source, 8).get_block_ids() == ([0, 2],)
    source.all_token_ids.append(0)
    manager.allocate_slots(source, 1)
    assert manager.get_forked_blocks(source, 8) is None


def test_a_fork_copies_the_state_within_a_block_and_shares_the_one_at_a_boundary():
    manager = make_manager(mamba())
    source = run_alone(manager, "r", range(10))
    within = fork(manager, source, "within", 10)
    assert table(manager, within) == [0, 0, 4]
    at_boundary = fork(manager, source, "at", 8)
    assert table(manager, at_boundary) == [0, 2, 5]
    assert copies(manager) == [(3, 4)]
    manager.check_invariants()


def test_only_new_blocks_of_attention_groups_are_cleared():
    manager = make_manager(full(), mamba())
    request = run_alone(manager, "r", range(6))
    assert manager.take_new_block_ids() == table(manager, request, 0) == [1, 2]
    assert manager.take_new_block_ids() == []
    fork(manager, source=request, request_id="s", num_tokens=6, token_ids=[*range(6), 7, 7, 7])
    # Block 5 of the pool is a copy, block 6 is new; 7 and 8 are states.
    assert table(manager, FakeRequest("s", ())) == [1, 5, 6]
    assert manager.take_new_block_ids() == [6]


def test_without_states_nothing_has_to_be_cleared():
    manager = make_manager(full(), full())
    run_alone(manager, "r", range(6))
    assert manager.take_new_block_ids() == []


@pytest.mark.parametrize(("num_new_tokens", "num_needed"), [(4, 2), (8, 3), (40, 10)])
def test_a_whole_sequence_needs_only_the_states_of_one_step_at_once(num_new_tokens, num_needed):
    manager = make()
    num_blocks = manager.get_num_blocks_for_full_sequence("r", 40, (), 0, num_new_tokens)
    assert num_blocks == num_needed
