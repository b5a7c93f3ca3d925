"""Slots of states: one complete slot per request, never shared; also with a scheduler."""

import pytest

from paxkv.errors import ConfigError, InvariantError, NeverFitsError
from paxkv.kv_cache.managers.mamba import MambaManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    finish_step,
    fork,
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


def step_to(manager, request, num_tokens):
    """Computes tokens up to a position in one step, and returns what the request reads."""
    num_new = num_tokens - request.num_computed_tokens
    assert manager.allocate_slots(request, num_new) is not None
    (group,) = manager.coordinator.state_managers
    slots = ids(group.get_first_step_blocks(request.request_id))
    manager.check_invariants()
    manager.finish_step()
    manager.check_invariants()
    finish_step(request, num_tokens)
    return slots


def hit(manager, token_ids):
    """Length of the longest hit of a new request, and the blocks of its group of states."""
    blocks, num_tokens = manager.get_computed_blocks(FakeRequest("hit", token_ids))
    return num_tokens, [block.block_id for block in blocks.blocks[-1]]


def test_state_at_a_save_point_stays_in_its_slot_and_is_found():
    manager = make_manager(full(), states(), num_blocks=30)
    request = FakeRequest("r", range(9))
    assert manager.cut_at_save_point(request, 0, 9) == 8
    assert admit(manager, request, 8)
    manager.finish_step()
    finish_step(request, 8)
    old = table(manager, request, 1)
    # It is written now, but the request may still overwrite it.
    assert hit(manager, range(20)) == (0, [])
    assert step_to(manager, request, 9) == [*old, *table(manager, request, 1)]
    assert not set(old) & set(table(manager, request, 1))
    assert hit(manager, range(20)) == (8, [0, old[0]])
    # A state exists only at its position.
    assert hit(manager, range(7))[0] == hit(manager, [*range(7), 99, 99])[0] == 0


def test_hit_reads_the_saved_slot_and_writes_another():
    manager = make_manager(full(), states(), num_blocks=30)
    request = FakeRequest("r", range(9))
    assert admit(manager, request, 8)
    manager.finish_step()
    finish_step(request, 8)
    old = table(manager, request, 1)
    step_to(manager, request, 9)
    later = FakeRequest("s", range(20))
    assert admit(manager, later)
    assert later.num_computed_tokens == 8
    group = manager.coordinator.single_type_managers[1]
    assert ids(group.get_first_step_blocks("s")) == [*old, *table(manager, later, 1)]
    assert [manager.block_pool.blocks[block_id].ref_cnt for block_id in old] == [1, 1, 1]
    manager.finish_step()
    manager.check_invariants()
    assert [manager.block_pool.blocks[block_id].ref_cnt for block_id in old] == [0, 0, 0]
    assert hit(manager, range(20))[0] == 8
    manager.check_invariants()


def test_without_room_for_a_second_slot_the_state_is_overwritten():
    # 3 blocks of a slot, and 3 of tokens.
    manager = make_manager(full(), states(), num_blocks=7)
    request = run_alone(manager, "r", range(8))
    request.all_token_ids.append(8)
    slot = table(manager, request, 1)
    assert step_to(manager, request, 9) == slot
    assert hit(manager, range(20)) == (0, [])


def test_hit_without_room_for_a_second_slot_continues_in_the_saved_one():
    manager = make_manager(full(), states(), num_blocks=10)
    request = run_alone(manager, "r", range(8))
    request.all_token_ids.append(8)
    slot = table(manager, request, 1)
    step_to(manager, request, 9)
    # Leaves 2 blocks with keys and values, 1 for new ones, and the 3 blocks of the saved state.
    held = [manager.block_pool.blocks[block_id] for block_id in table(manager, request, 1)]
    manager.free(request)
    manager.block_pool.allocate_blocks(held)
    later = FakeRequest("s", range(10))
    assert admit(manager, later)
    assert later.num_computed_tokens == 8 and table(manager, later, 1) == slot
    assert hit(manager, range(20)) == (0, [])
    manager.block_pool.free_blocks(held)
    manager.check_invariants()


def test_slot_that_loses_a_block_is_not_found():
    manager = make_manager(full(), states(), num_blocks=12)
    request = run_alone(manager, "r", range(8))
    request.all_token_ids.append(8)
    slot = table(manager, request, 1)
    step_to(manager, request, 9)
    manager.free(request)
    free_ids = ids(manager.block_pool.free_block_queue.get_all_free_blocks())
    taken = manager.block_pool.get_new_blocks(free_ids.index(slot[0]) + 1)
    assert hit(manager, range(20)) == (0, [])
    manager.block_pool.free_blocks(taken)
    manager.check_invariants()


def test_request_that_shares_keys_but_has_no_state_saves_one_there():
    manager = make_manager(full(), states(), num_blocks=40)
    run_alone(manager, "r", range(20))
    request = FakeRequest("s", [*range(10), *[99] * 9])
    assert manager.get_computed_blocks(request)[1] == 0
    request.state_save_at = manager.get_state_to_save(request, 0)
    assert request.state_save_at == 8
    assert [manager.cut_at_save_point(request, start, 19 - start) for start in (0, 8, 16)] == [
        8,
        8,
        3,
    ]
    assert admit(manager, request, 8)
    finish_step(request, 8)
    manager.finish_step()
    step_to(manager, request, 16)
    assert hit(manager, [*range(10), *[5] * 9])[0] == 8


@pytest.mark.parametrize("num_tokens", [4, 5, 8, 9, 13, 29])
def test_last_state_of_a_decoding_request_is_found_when_it_ends(num_tokens):
    manager = make_manager(full(), states(), num_blocks=60)
    request = run_alone(manager, "r", range(3))
    decode(manager, request, num_tokens)
    (group,) = manager.coordinator.state_managers
    # It writes three slots in turn, and holds those of its newest two states.
    assert group.num_held_blocks == 3 * min(3, 1 + (num_tokens - 1) // 4)
    assert hit(manager, range(40))[0] == 0
    manager.free(request)
    manager.check_invariants()
    # The state at a multiple of 4 is saved when the step after it has another slot.
    num_found = (num_tokens - 1) // 4 * 4
    assert hit(manager, range(40))[0] == num_found
    assert [state.num_tokens for state in group.saved_states.find_all()] == [num_found] * (
        num_found > 0
    )


def test_state_is_found_after_its_slot_is_not_held_any_more():
    manager = make_manager(full(), states(), num_blocks=60)
    request = run_alone(manager, "r", range(3))
    decode(manager, request, 9)
    assert [manager.free_spare_slot() for _ in range(3)] == [True, True, False]
    manager.check_invariants()
    assert hit(manager, range(6))[0] == 4 and hit(manager, range(40))[0] == 8


def decode(manager, request, end):
    """Computes single tokens until the request has `end` of them."""
    for num_tokens in range(request.num_tokens + 1, end + 1):
        request.all_token_ids.append(num_tokens - 1)
        step_to(manager, request, num_tokens)


def test_slot_that_another_request_keeps_for_forks_is_not_written():
    manager = make_manager(full(), states(), num_blocks=60)
    request = FakeRequest("r", range(9))
    assert admit(manager, request, 8)
    manager.finish_step()
    finish_step(request, 8)
    step_to(manager, request, 9)
    source = FakeRequest("s", range(9))
    source.keeps_state_for_forks = True
    assert admit(manager, source)
    manager.finish_step()
    finish_step(source)
    (kept,) = manager.get_forked_blocks(source, 8).blocks[1]
    decode(manager, request, 40)
    assert kept.block_id not in table(manager, request, 1)
    assert hit(manager, range(10)) == (8, [0, kept.block_id])
    # The requests also hold their own slots, and the first one two states.
    assert manager.coordinator.state_managers[0].num_held_blocks == 5 * 3
    manager.free(source)
    manager.free(request)
    manager.check_invariants()


def test_groups_with_unequal_room_do_not_switch_in_the_middle_of_a_burst():
    manager = make_manager(full(), states(), states(2), num_blocks=20)
    request = run_alone(manager, "r", range(8))
    request.all_token_ids.append(8)
    # One more slot of 3 blocks fits, and one of 6 does not.
    manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 4)
    assert manager.allocate_slots(request, 1) is not None
    small, large = manager.coordinator.state_managers
    assert small.has_switched("r") and not large.has_switched("r")
    manager.block_pool.free_blocks(manager.block_pool.blocks[-6:])
    assert manager.reserve_slots(request, 16) is not None
    assert manager.switch_slot(request, 16) is None


def test_slot_held_for_an_ended_request_breaks_an_invariant():
    manager = make_manager(full(), states(), num_blocks=60)
    request = run_alone(manager, "r", range(3))
    decode(manager, request, 9)
    states_of_requests = manager.coordinator.state_managers[0].saved_states
    manager.free(request)
    (state,) = states_of_requests.find_all()
    manager.check_invariants()
    manager.block_pool.touch(state.blocks)
    manager.coordinator.state_managers[0].num_held_blocks += 3
    states_of_requests.hold(state)
    with pytest.raises(InvariantError, match="hold no slot of their own"):
        manager.check_invariants()


def test_running_request_is_forked_before_the_last_token_of_its_prompt():
    manager = make_manager(full(), states(), num_blocks=40, enable_caching=False)
    source = FakeRequest("r", range(7))
    source.keeps_state_for_forks = True
    assert manager.cut_at_save_point(source, 0, 7) == 6
    assert admit(manager, source, 6)
    manager.finish_step()
    finish_step(source, 6)
    assert manager.get_max_tokens_before_allocate(source) == 6
    assert manager.get_forked_blocks(source, 6) is None
    slot = table(manager, source, 1)
    step_to(manager, source, 7)
    assert manager.get_forked_blocks(source, 5) is None
    child = fork(manager, source, "c", 6)
    group = manager.coordinator.single_type_managers[1]
    assert ids(group.get_first_step_blocks("c")) == [*slot, *table(manager, child, 1)]
    manager.finish_step()
    manager.check_invariants()
    assert manager.free_spare_slot() and not manager.free_spare_slot()
    assert manager.get_forked_blocks(source, 6) is None
    manager.check_invariants()


def test_ended_request_is_forked_after_its_last_token():
    manager = make_manager(full(), states(), num_blocks=40)
    source = run_alone(manager, "r", range(7))
    assert manager.get_forked_blocks(source, 7) is None
    assert manager.get_forked_blocks(source, 6, is_final=True) is None
    blocks = manager.get_forked_blocks(source, 7, is_final=True)
    assert ids(blocks.blocks[1]) == table(manager, source, 1)[:1]


def test_computed_tokens_without_a_state_raise():
    with pytest.raises(InvariantError, match="no state of its first 8 tokens"):
        make().allocate_new_computed_blocks("r", (), 0, 8)


def test_a_slot_of_two_requests_breaks_an_invariant():
    manager = make()
    slot = manager.allocate_new_blocks("r", 1, 1)
    manager.req_to_blocks["s"] = [*slot[1:], slot[0]]
    with pytest.raises(InvariantError, match="share blocks"):
        manager.check_invariants()


def test_a_part_of_a_slot_breaks_an_invariant():
    manager = make()
    manager.allocate_new_blocks("r", 1, 1)
    manager._free_blocks([manager.req_to_blocks["r"].pop()])
    with pytest.raises(InvariantError, match="slots of 6 blocks are not whole"):
        manager.check_invariants()


def test_saved_state_that_a_request_writes_breaks_an_invariant():
    manager = make_manager(full(), states(), num_blocks=30)
    request = FakeRequest("r", range(9))
    assert admit(manager, request, 8)
    manager.finish_step()
    finish_step(request, 8)
    old = table(manager, request, 1)
    step_to(manager, request, 9)
    group = manager.coordinator.single_type_managers[1]
    group.req_to_blocks["r"] = [manager.block_pool.blocks[block_id] for block_id in old]
    with pytest.raises(InvariantError, match="writes a saved state"):
        group.check_invariants()


def test_a_slot_is_allocated_at_admission_and_freed_at_the_end():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS), caching=False), FunctionRunner()
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


def test_equal_prompts_share_all_but_the_last_tokens():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS)), FunctionRunner()
    num_found = []
    for name in "abc":
        request = add(scheduler, name, range(9), max_tokens=2)
        for _ in range(3):
            step(scheduler, runner)
            scheduler.check_invariants()
        assert request.all_token_ids[9:] == continuation(range(9), 2)
        num_found.append(request.num_cached_tokens)
    assert num_found == [0, 8, 8]


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


def test_forks_compute_only_the_last_token_of_their_prompt():
    scheduler = make_scheduler(specs=(full(), SLOTS), caching=False)
    runner = FunctionRunner()
    add(scheduler, "a", range(9), keep_blocks=True, max_tokens=5)
    add(scheduler, "b", range(9), fork_from="a", max_tokens=5)
    add(scheduler, "c", range(9), fork_from="a", max_tokens=5)
    outputs = [step(scheduler, runner) for _ in range(2)]
    assert [output.num_scheduled_tokens for output in outputs] == [
        {"a": 8},
        {"a": 1, "b": 1, "c": 1},
    ]
    scheduler.check_invariants()


def test_ended_request_with_one_token_is_continued_from_its_last_state():
    scheduler, runner = make_scheduler(specs=(full(), SLOTS)), FunctionRunner()
    add(scheduler, "a", range(9), keep_blocks=True, max_tokens=1)
    for _ in range(2):
        step(scheduler, runner)
    assert scheduler.kv_cache_manager.usage > 0
    token = continuation(range(9), 1)
    add(scheduler, "b", [*range(9), *token], fork_from="a", max_tokens=2)
    (new,) = step(scheduler, runner).scheduled_new_reqs
    assert new.num_computed_tokens == 9
    scheduler.finish_requests(["a", "b"])
    assert scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("settings", [{"use_eagle": True}, {"connector": InMemoryConnector()}])
def test_dropped_blocks_and_connectors_are_rejected(settings):
    with pytest.raises(ConfigError, match="a model with states cannot use a KV connector, or drop"):
        make_scheduler(specs=(full(), SLOTS), **settings)


def test_running_request_without_a_slot_breaks_an_invariant():
    scheduler = make_scheduler(specs=(full(), SLOTS))
    add(scheduler, "a", 5)
    step(scheduler, FunctionRunner())
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    manager.free("a", 5)
    with pytest.raises(InvariantError, match="has no slot for its state"):
        scheduler.check_invariants()
