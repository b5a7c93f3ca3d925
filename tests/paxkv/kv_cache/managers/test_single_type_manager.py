"""Block tables of any kind: copy-on-write, forks, external tokens, and checks of invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.errors import InvariantError
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
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
    run_alone,
    state,
    states,
    table,
    window,
)


def make_forked(num_tokens, *, num_source_tokens=6, **settings):
    """A source whose tokens are computed, and a fork that shares the first of them."""
    manager = make_manager(**settings)
    source = run_alone(manager, "source", range(num_source_tokens))
    return manager, source, fork(manager, source, "fork", num_tokens)


def test_a_fork_copies_the_partly_filled_block_and_shares_the_full_ones():
    manager, source, forked = make_forked(6)
    assert (table(manager, source), table(manager, forked)) == ([1, 2], [1, 3])
    assert copies(manager) == [(2, 3)]
    assert [manager.block_pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [2, 1, 1]
    manager.check_invariants()


def test_a_fork_at_a_block_boundary_copies_nothing():
    manager, source, forked = make_forked(8, num_source_tokens=8)
    assert (table(manager, source), table(manager, forked)) == ([1, 2], [1, 2, 3])
    assert copies(manager) == []
    manager.check_invariants()


def test_a_fork_in_the_middle_of_a_full_block_copies_it():
    # Block 2 is full and cached, so no request may write into it.
    manager, source, forked = make_forked(6, num_source_tokens=8)
    assert (table(manager, source), table(manager, forked)) == ([1, 2], [1, 3])
    assert copies(manager) == [(2, 3)]
    # The copy gets its own hash when the fork's tokens fill it.
    forked.all_token_ids.append(98)
    finish_step(forked, 7)
    manager.allocate_slots(forked, 1)
    hits, num_hits = manager.get_computed_blocks(FakeRequest("s", [0, 1, 2, 3, 4, 5, 99, 98, 0]))
    assert (hits.get_block_ids(), num_hits) == (([1, 3],), 8)
    assert manager.get_computed_blocks(FakeRequest("t", range(9)))[0].get_block_ids() == ([1, 2],)
    manager.check_invariants()


def test_a_cached_block_without_other_holders_is_copied():
    # The source has ended, so only the fork holds its blocks; block 2 is still cached.
    manager = make_manager()
    source = run_alone(manager, "source", range(8))
    blocks = manager.get_forked_blocks(source, 6)
    manager.free(source)
    forked = FakeRequest("fork", range(7))
    assert manager.allocate_slots(forked, 1, 6, blocks) is not None
    assert table(manager, forked) == [1, 3]
    assert copies(manager) == [(2, 3)]
    # No request holds the original any more, but it is still cached.
    assert ids(manager.block_pool.free_block_queue.get_all_free_blocks())[-1] == 2
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 8
    manager.check_invariants()


def test_an_unshared_uncached_block_is_not_copied():
    # The source has ended and its half-filled block has no hash, so the fork continues in it.
    manager = make_manager()
    source = run_alone(manager, "source", range(6))
    blocks = manager.get_forked_blocks(source, 6)
    manager.free(source)
    forked = FakeRequest("fork", range(8))
    assert manager.allocate_slots(forked, 1, 6, blocks) is not None
    assert (table(manager, forked), copies(manager)) == ([1, 2], [])
    forked.num_computed_tokens = 7
    manager.allocate_slots(forked, 1)
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 8
    manager.check_invariants()


def test_forks_work_without_prefix_caching():
    manager, source, forked = make_forked(6, enable_caching=False)
    assert (table(manager, source), table(manager, forked)) == ([1, 2], [1, 3])
    assert copies(manager) == [(2, 3)]
    manager.free(source)
    manager.free(forked)
    assert manager.usage == 0
    manager.check_invariants()


def test_forks_of_forks_each_hold_the_block_that_they_write():
    manager, source, child = make_forked(6)
    grandchild = fork(manager, child, "grandchild", 6, token_ids=[*range(6), 7])
    assert [table(manager, r) for r in (source, child, grandchild)] == [[1, 2], [1, 3], [1, 4]]
    # The child's block is the target of a copy of the same step, so the copy reads the source.
    assert copies(manager) == [(2, 3), (2, 4)]
    finish_step(child)
    finish_step(grandchild)
    great = fork(manager, grandchild, "great", 7)
    assert (table(manager, great), copies(manager)) == ([1, 5], [(4, 5)])
    assert manager.block_pool.blocks[1].ref_cnt == 4
    for request in (source, grandchild, child, great):
        manager.free(request)
        manager.check_invariants()
    assert manager.usage == 0


def test_the_copy_for_a_fork_that_ends_before_the_step_is_dropped():
    manager, source, forked = make_forked(6)
    manager.free(forked)
    assert copies(manager) == []
    other = fork(manager, source, "other", 6)
    assert copies(manager) == [(2, table(manager, other)[1])]


def test_a_fork_needs_computed_tokens_and_held_blocks():
    manager = make_manager()
    source = run_alone(manager, "source", range(6))
    assert manager.get_forked_blocks(source, 7) is None
    assert manager.get_forked_blocks(source, 0) is None
    assert manager.get_forked_blocks(source, 1).get_block_ids() == ([1],)
    manager.free(source)
    assert manager.get_forked_blocks(source, 6) is None
    assert manager.get_forked_blocks(FakeRequest("unknown", range(6)), 6) is None


def test_a_fork_does_not_count_as_a_prefix_cache_look_up():
    manager = make_manager()
    source = run_alone(manager, "source", range(6))
    before = str(manager.prefix_cache_stats)
    assert fork(manager, source, "fork", 6) is not None
    assert str(manager.prefix_cache_stats) == before


def test_a_fork_without_room_for_its_copy_changes_nothing():
    manager = make_manager(num_blocks=3)
    source = run_alone(manager, "source", range(6))
    blocks = manager.get_forked_blocks(source, 6)
    before = state(manager)
    assert manager.allocate_slots(FakeRequest("fork", range(7)), 1, 6, blocks) is None
    assert state(manager) == before
    assert copies(manager) == []
    # At a boundary it needs a new block as well.
    assert (
        manager.allocate_slots(
            FakeRequest("fork", range(7)), 1, 4, manager.get_forked_blocks(source, 4)
        )
        is None
    )
    assert state(manager) == before


def test_the_request_that_writes_into_a_shared_block_gets_the_copy():
    # Two requests hold a half-filled block. The next request that writes into it gets a copy.
    manager = make_group(FullAttentionManager, full())
    manager.allocate_new_blocks("r", 6, 6)
    manager.allocate_new_computed_blocks("s", list(manager.get_blocks("r")), 6, 0)
    assert manager.get_num_blocks_to_allocate("r", 7, (), 6, 7) == 1
    manager.replace_shared_blocks("r", 6, 7)
    assert ids(manager.get_blocks("r")) == [1, 3]
    assert manager.get_num_blocks_to_allocate("s", 7, (), 6, 7) == 0
    manager.replace_shared_blocks("s", 6, 7)
    assert ids(manager.get_blocks("s")) == [1, 2]
    work = manager.device_block_work
    assert [(c.source_block_id, c.target_block_id) for c in work.drain_copies()] == [(2, 3)]
    manager.check_invariants()


def test_a_shared_block_written_from_its_start_is_replaced_without_a_copy():
    # Block 2 was reserved for lookahead, so it has no content that the writer needs.
    manager = make_group(FullAttentionManager, full())
    manager.allocate_new_blocks("r", 6, 4)
    manager.allocate_new_computed_blocks("s", list(manager.get_blocks("r")), 8, 0)
    assert manager.get_num_blocks_to_allocate("r", 6, (), 4, 6) == 1
    manager.replace_shared_blocks("r", 4, 6)
    assert ids(manager.get_blocks("r")) == [1, 3]
    assert manager.device_block_work.drain_copies() == []
    manager.check_invariants()


@given(
    specs=st.sampled_from(
        [(full(),), (window(6), full(8)), (full(), states(2, block_size=8), window(3, 8))]
    ),
    data=st.data(),
)
def test_block_tables_of_running_requests_only_grow(specs, data):
    # A request shares blocks only at its admission, and never blocks into which others write.
    # Therefore the runner gets only appended blocks.
    manager = make_manager(*specs, num_blocks=200)
    requests = [run_alone(manager, "r", [0] * data.draw(st.integers(1, 20)))]
    for step in range(data.draw(st.integers(1, 12))):
        request = data.draw(st.sampled_from(requests))
        action = data.draw(st.sampled_from(["equal", "fork", "fork", "go on", "go on", "free"]))
        if action == "equal":
            requests.append(run_alone(manager, f"r{step}", [0] * data.draw(st.integers(1, 20))))
        elif action == "fork":
            num_shared = data.draw(st.integers(1, request.num_computed_tokens))
            if manager.get_forked_blocks(request, num_shared) is not None:
                requests.append(fork(manager, request, f"r{step}", num_shared))
                finish_step(requests[-1])
        elif action == "free" and len(requests) > 1:
            requests.remove(request)
            manager.free(request)
        else:
            before = manager.get_block_ids(request.request_id)
            request.all_token_ids += [1] * data.draw(st.integers(1, 6))
            manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens)
            finish_step(request)
            after = manager.get_block_ids(request.request_id)
            for group_manager, old, new in zip(
                manager.coordinator.single_type_managers, before, after, strict=True
            ):
                if group_manager.holds_tokens:
                    assert all(new[i] in (0, block_id) for i, block_id in enumerate(old))
        manager.drain_block_copies()
        manager.finish_step()
        for request in requests:
            for group in manager.coordinator.single_type_managers:
                if not group.holds_tokens:
                    continue
                first_written = request.num_computed_tokens // group.block_size
                written = group.get_blocks(request.request_id)[first_written:]
                assert all(b.ref_cnt == 1 and b.block_hash is None for b in written)


def test_every_shared_block_that_is_written_is_copied():
    manager = make_group(FullAttentionManager, full())
    manager.allocate_new_blocks("r", 12, 12)
    manager.allocate_new_computed_blocks("s", list(manager.get_blocks("r")), 12, 0)
    assert manager.get_num_blocks_to_allocate("s", 13, (), 6, 13) == 3
    manager.replace_shared_blocks("s", 6, 13)
    manager.allocate_new_blocks("s", 13, 13)
    assert ids(manager.get_blocks("s")) == [1, 4, 5, 6]
    work = manager.device_block_work
    assert [(c.source_block_id, c.target_block_id) for c in work.drain_copies()] == [(2, 4)]
    manager.check_invariants()


def test_a_rewritten_block_is_cached_again():
    manager = make_manager()
    request = run_alone(manager, "r", range(8))
    # Its last four tokens were invalid, so they are computed again.
    request.num_computed_tokens = 4
    request.all_token_ids[4:] = [50, 51, 52, 53]
    manager.allocate_slots(request, 4)
    assert table(manager, request) == [1, 3]
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[0].get_block_ids() == ([1, 2],)
    found = manager.get_computed_blocks(FakeRequest("s", [*request.all_token_ids, 0]))[0]
    assert found.get_block_ids() == ([1, 3],)
    manager.check_invariants()


def test_blocks_of_external_tokens_are_cached_after_the_load():
    manager = make_manager()
    first = run_alone(manager, "first", range(4))
    request = FakeRequest("r", range(14))
    hits, num_hits = manager.get_computed_blocks(request)
    assert num_hits == 4
    # Loaded before any token is computed: 0 new tokens, 8 external ones.
    new = manager.allocate_slots(
        request, 0, 4, hits, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert table(manager, request) == [*table(manager, first), *new.get_block_ids()[0]] == [1, 2, 3]
    assert manager.get_computed_blocks(FakeRequest("s", range(14)))[1] == 4
    request.num_computed_tokens = 12
    manager.cache_blocks(request, 12)
    assert manager.get_computed_blocks(FakeRequest("s", range(14)))[1] == 12
    manager.allocate_slots(request, 2)
    assert table(manager, request) == [1, 2, 3, 4]
    manager.check_invariants()


def test_hits_of_a_request_that_ends_during_its_load_stay_cached():
    manager = make_manager()
    run_alone(manager, "first", range(8))
    request = FakeRequest("r", range(20))
    hits, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(
        request, 0, 8, hits, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    # It has no computed tokens before the load ends; another request computed its hits.
    manager.free(request)
    assert manager.get_computed_blocks(FakeRequest("s", range(20)))[1] == 8
    manager.check_invariants()


def test_a_replaced_hit_that_was_never_written_leaves_the_cache():
    manager = make_manager()
    run_alone(manager, "first", range(8))
    request = FakeRequest("r", range(9))
    assert admit(manager, request)
    # It goes back to token 4, now with other tokens after it, and ends before the step runs.
    request.num_computed_tokens = 4
    request.all_token_ids[4:8] = [50, 51, 52, 53]
    manager.allocate_slots(request, 5)
    assert manager.get_computed_blocks(FakeRequest("s", request.all_token_ids))[1] == 8
    manager.free(request)
    assert manager.get_computed_blocks(FakeRequest("s", request.all_token_ids))[1] == 4
    manager.check_invariants()


def test_a_new_block_is_never_another_groups_hit():
    # The pool has 4 free blocks, three of them hits; the external tokens need only the fourth.
    manager = make_manager(full(), window(5), num_blocks=5)
    first = FakeRequest("first", range(5))
    assert admit(manager, first)
    finish_step(first)
    manager.free(first)
    request = FakeRequest("r", range(9))
    hits, num_hits = manager.get_computed_blocks(request)
    hit_ids = [block_ids[0] for block_ids in hits.get_block_ids()]
    assert num_hits == 4
    assert manager.allocate_slots(request, 1, 4, hits, num_external_computed_tokens=2) is not None
    tables = manager.get_block_ids("r")
    assert [block_ids[0] for block_ids in tables] == hit_ids
    assert len({*tables[0], *tables[1]}) == 4
    manager.check_invariants()


def test_max_tokens_before_allocate_ends_at_a_full_or_missing_block():
    manager = make_group(FullAttentionManager, full())
    manager.allocate_new_blocks("r", 6, 6)
    # 4 tokens fill the first block, which must then be cached: only three need no call.
    assert manager.get_max_tokens_before_allocate("r") == 3
    manager.num_cached_blocks["r"] = 1
    assert manager.get_max_tokens_before_allocate("r") == 7
    manager.num_cached_blocks["r"] = 2
    assert manager.get_max_tokens_before_allocate("r") == 8
    plain = make_group(FullAttentionManager, full(), enable_caching=False)
    plain.allocate_new_blocks("r", 6, 6)
    assert plain.get_max_tokens_before_allocate("r") == 8
    assert plain.get_max_tokens_before_allocate("unknown") == 0


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda m: m.num_cached_blocks.update(r=0), "counts num_cached=0"),
        (lambda m: m.num_cached_blocks.update(r=9), "counts num_cached=9"),
        (lambda m: m.req_to_blocks["r"].__setitem__(0, m.block_pool.null_block), "null blocks"),
        (lambda m: m.num_skipped_blocks.update(r=1), "null blocks"),
        (lambda m: setattr(m, "num_held_blocks", 3), "counted self.num_held_blocks=3"),
        (lambda m: m.num_cached_blocks.update(gone=0), "hold no blocks"),
        (lambda m: setattr(m, "kv_cache_group_id", 1), "another group"),
    ],
)
def test_check_invariants_detects(break_it, complaint):
    manager = make_manager()
    run_alone(manager, "r", range(6))
    (group,) = manager.coordinator.single_type_managers
    assert isinstance(group, SingleTypeKVCacheManager)
    group.check_invariants()
    break_it(group)
    with pytest.raises(InvariantError, match=complaint):
        group.check_invariants()
