"""Slots of states: one complete slot per request, never shared; also with a scheduler."""

import pytest

from paxkv.errors import ConfigError, InvariantError, NeverFitsError
from paxkv.kv_cache.managers.mamba import MambaManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    full,
    ids,
    make_group,
    make_manager,
    run_alone,
    states,
    table,
)
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector
from tests.paxkv.scheduler.stepping import (
    FunctionRunner,
    add,
    continuation,
    make_scheduler,
    step,
)

SLOTS = states(2)  # 6 blocks


def make(num_parts=2, blocks_per_state=3, **settings):
    return make_group(MambaManager, states(num_parts, blocks_per_state), **settings)


def test_a_slot_is_allocated_once_and_freed_as_a_whole():
    manager = make()
    assert manager.get_num_blocks_to_allocate("r", 1, (), 0, 1) == 6
    assert manager.get_num_blocks_for_full_sequence("r", 1000, (), 0, 8) == 6
    assert ids(manager.allocate_new_blocks("r", 1, 1)) == [1, 2, 3, 4, 5, 6]
    assert manager.get_num_blocks_to_allocate("r", 1000, (), 1, 1000) == 0
    assert manager.allocate_new_blocks("r", 1000, 1000) == ()
    assert manager.num_held_blocks == 6
    manager.check_invariants()
    manager.free("r", 1000)
    assert manager.num_held_blocks == 0
    assert manager.block_pool.get_num_free_blocks() == 19


def test_without_room_for_a_slot_allocation_changes_nothing():
    manager = make_manager(full(), states(2), num_blocks=8)
    assert not admit(manager, FakeRequest("r", range(5)))
    assert manager.block_pool.get_num_free_blocks() == 7
    assert admit(manager, FakeRequest("s", range(4)))
    assert table(manager, FakeRequest("s", ()), 1) == [2, 3, 4, 5, 6, 7]
    manager.check_invariants()


def test_there_are_no_hits_and_no_forks():
    manager = make_manager(full(), states())
    request = run_alone(manager, "r", range(9))
    assert not manager.enable_caching
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0
    assert [manager.get_forked_blocks(request, n) for n in (4, 9)] == [None, None]


def test_computed_tokens_without_a_state_raise():
    with pytest.raises(InvariantError, match="no state of its first 8 tokens"):
        make().allocate_new_computed_blocks("r", (), 0, 8)


def test_a_slot_of_two_requests_and_a_part_of_a_slot_break_an_invariant():
    manager = make()
    slot = manager.allocate_new_blocks("r", 1, 1)
    manager.req_to_blocks["s"] = list(slot)
    manager.block_pool.touch(slot)
    with pytest.raises(InvariantError, match="shares blocks of its slot"):
        manager.check_invariants()
    manager = make()
    manager.allocate_new_blocks("r", 1, 1)
    block = manager.req_to_blocks["r"].pop()
    manager._free_blocks([block])
    with pytest.raises(InvariantError, match="has 5 blocks; a slot has 6"):
        manager.check_invariants()


def test_a_slot_is_allocated_at_admission_and_freed_at_the_end():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS)), FunctionRunner()
    add(scheduler, "a", range(9), max_tokens=3)
    (new,) = step(scheduler, runner).scheduled_new_reqs
    assert [len(ids) for ids in new.block_ids] == [3, 6]
    for _ in range(2):
        output = step(scheduler, runner)
        assert not any(
            blocks and blocks[1] for blocks in output.scheduled_cached_reqs.new_block_ids
        )
    assert scheduler.kv_cache_manager.usage == 0
    scheduler.check_invariants()


def test_equal_prompts_share_no_blocks_and_have_no_hashes():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS)), FunctionRunner()
    for name in "ab":
        request = add(scheduler, name, range(9))
        step(scheduler, runner)
        assert (request.num_cached_tokens, request.block_hashes) == (0, [])
    tables = [set(scheduler.kv_cache_manager.get_block_ids(name)[1]) for name in "ab"]
    assert not tables[0] & tables[1]


def test_without_room_for_a_slot_a_request_is_preempted_and_computed_again():
    # 2 x 6 blocks of slots leave 4 blocks for the tokens of both requests.
    scheduler = make_scheduler(specs=(full(), SLOTS), num_blocks=17, full_sequence_must_fit=False)
    runner = FunctionRunner()
    requests = {
        name: add(scheduler, name, range(i, i + 6), max_tokens=8) for i, name in enumerate("ab")
    }
    for _ in range(40):
        step(scheduler, runner)
        scheduler.check_invariants()
    assert not scheduler.has_unfinished_requests()
    for i, request in enumerate(requests.values()):
        assert request.all_token_ids[6:] == continuation(range(i, i + 6), 8)
    assert sum(request.num_preemptions for request in requests.values()) > 0


def test_a_request_that_could_never_get_a_slot_is_rejected():
    scheduler = make_scheduler(specs=(full(), SLOTS), num_blocks=7)
    with pytest.raises(NeverFitsError, match="may need 7 KV cache blocks; there are 6"):
        add(scheduler, "a", 1, max_tokens=1)


def test_forks_compute_all_tokens_and_slots_are_not_kept():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS)), FunctionRunner()
    add(scheduler, "a", range(9), keep_blocks=True, max_tokens=1)
    step(scheduler, runner)
    assert scheduler.kv_cache_manager.usage == 0
    add(scheduler, "b", range(9))
    add(scheduler, "c", range(9), fork_from="b")
    new = step(scheduler, runner).scheduled_new_reqs
    assert [(request.req_id, request.num_computed_tokens) for request in new] == [
        ("b", 0),
        ("c", 0),
    ]


@pytest.mark.parametrize(
    "settings", [{"num_lookahead_tokens": 1}, {"connector": InMemoryConnector()}]
)
def test_drafts_and_connectors_are_rejected(settings):
    with pytest.raises(
        ConfigError, match="a model with states cannot use a KV connector or drafts"
    ):
        make_scheduler(specs=(full(), SLOTS), **settings)


def test_running_request_without_a_slot_breaks_an_invariant():
    scheduler = make_scheduler(specs=(full(), SLOTS))
    add(scheduler, "a", 5)
    step(scheduler, FunctionRunner())
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    manager.free("a", 5)
    with pytest.raises(InvariantError, match="has no slot for its state"):
        scheduler.check_invariants()
