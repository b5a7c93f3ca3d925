"""Blocks that could not be loaded: their request continues before them, and they are never hits."""

import pytest

from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.participants.invalid_blocks import (
    block_ids_from,
    can_continue_from,
    num_valid_tokens,
)
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector, MemoryRunner
from tests.paxkv.scheduler.stepping import (
    FunctionRunner,
    add,
    answer,
    continuation,
    counts,
    ids,
    make_scheduler,
    step,
    window,
)

PROMPT = list(range(14))


def make(**settings):
    connector = InMemoryConnector(is_async=settings.pop("is_async", False))
    connector.store(PROMPT)
    return make_scheduler(connector=connector, **settings), MemoryRunner(connector)


def test_valid_tokens_end_at_the_first_invalid_block_of_any_group():
    scheduler, runner = make_scheduler(specs=(window(64), window(63))), FunctionRunner()
    request = add(scheduler, "a", 10)
    step(scheduler, runner)
    manager = scheduler.kv_cache_manager
    first, second = manager.get_block_ids("a")
    assert num_valid_tokens(manager, request, {first[2], second[1]}) == 4
    assert num_valid_tokens(manager, request, {99}) is None
    assert block_ids_from(manager, request, 4) == {*first[1:], *second[1:]}


def test_a_request_continues_only_in_unshared_blocks_without_gaps():
    scheduler, runner = make_scheduler(), FunctionRunner()
    request = add(scheduler, "a", range(10))
    step(scheduler, runner)
    manager = scheduler.kv_cache_manager
    assert can_continue_from(manager, request, 4)
    assert not can_continue_from(manager, request, 0)
    add(scheduler, "b", range(10))
    step(scheduler, runner)
    assert not can_continue_from(manager, request, 4)
    assert can_continue_from(manager, request, 8)

    scheduler, runner = make_scheduler(specs=(window(4),)), FunctionRunner()
    request = add(scheduler, "a", range(10))
    for _ in range(2):
        step(scheduler, runner)
    assert not can_continue_from(scheduler.kv_cache_manager, request, 8)


def test_after_a_failed_synchronous_load_tokens_are_computed_from_there():
    scheduler, runner = make()
    request = add(scheduler, "a", PROMPT, max_tokens=3)
    output = scheduler.schedule()
    assert counts(output) == {"a": 2}
    result = runner.execute(output, failed_blocks=[1])
    # Its token was computed from blocks that were not loaded.
    assert scheduler.update_from_output(output, result) == []
    scheduler.check_invariants()
    assert (request.num_computed_tokens, request.num_tokens) == (4, 14)
    # Only the first block is cached.
    assert scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 4
    runner.token_ids["a"] = list(PROMPT)
    output = step(scheduler, runner)
    assert counts(output) == {"a": 10}
    assert output.scheduled_cached_reqs.num_computed_tokens == [4]
    assert output.preempted_req_ids == frozenset()
    for _ in range(2):
        step(scheduler, runner)
    assert runner.token_ids["a"][14:] == continuation(PROMPT, 3)


def test_requests_that_share_a_failed_block_are_preempted_in_order():
    scheduler, runner = make(max_num_seqs=8)
    for name in ("a", "b"):
        add(scheduler, name, PROMPT, max_tokens=3)
    add(scheduler, "c", 3, max_tokens=9)
    output = scheduler.schedule()
    result = runner.execute(output, failed_blocks=[1])
    assert [r.request_id for r in scheduler.update_from_output(output, result)] == ["c"]
    scheduler.check_invariants()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["c"], ["a", "b"])
    for name in ("a", "b"):
        runner.token_ids[name] = list(PROMPT)
    output = step(scheduler, runner)
    # The preemptions are reported, and the requests resume in the same step.
    assert output.preempted_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a", "b"}
    for _ in range(3):
        step(scheduler, runner)
    for name in ("a", "b"):
        assert runner.token_ids[name][14:] == continuation(PROMPT, 3)


@pytest.mark.parametrize(("failed", "num_valid"), [(2, 8), (0, 0)])
def test_a_failed_asynchronous_load_keeps_the_tokens_before_the_failure(failed, num_valid):
    scheduler, runner = make(is_async=True)
    add(scheduler, "a", PROMPT, max_tokens=2)
    step(scheduler, runner)
    invalid = runner.load("a", failed_blocks=[failed])
    # Blocks may fail before the whole load ends.
    step(scheduler, runner, transfers={"invalid_block_ids": invalid})
    step(scheduler, runner, transfers={"finished_recving": frozenset("a")})
    if num_valid == 0:
        # The request has no tokens and no blocks, so it is loaded again.
        output = step(scheduler, runner)
        assert len(output.kv_connector_metadata.loads) == 1
        return
    output = step(scheduler, runner)
    assert output.scheduled_new_reqs[0].num_computed_tokens == num_valid
    assert counts(output) == {"a": 14 - num_valid}
    step(scheduler, runner)
    assert runner.token_ids["a"][14:] == continuation(PROMPT, 2)


def test_sharing_blocks_computed_from_a_failed_block_also_preempts():
    connector = InMemoryConnector()
    connector.store(range(12))
    scheduler = make_scheduler(connector=connector, specs=(window(5),))
    for name in ("a", "b"):
        add(scheduler, name, range(18))
    output = scheduler.schedule()
    # Token 12 sees 8 to 12: blocks 0 and 1 are not even loaded. "b" hits block 3 alone.
    a, b = output.scheduled_new_reqs
    assert (a.num_computed_tokens, b.num_computed_tokens) == (12, 16)
    assert a.block_ids[0][:2] == [0, 0]
    assert b.block_ids[0][:4] == [0, 0, 0, a.block_ids[0][3]]
    failed = {"invalid_block_ids": frozenset({a.block_ids[0][2]})}
    result = answer({"a": [7], "b": [7]}, transfers=failed)
    assert scheduler.update_from_output(output, result) == []
    scheduler.check_invariants()
    assert ids(scheduler.waiting) == ["a", "b"]
    assert scheduler.kv_cache_manager.get_computed_blocks(scheduler.requests["b"])[1] == 0


def test_blocks_that_an_aborted_request_computed_from_a_load_in_flight_are_not_cached():
    connector = InMemoryConnector()
    connector.store(range(12))
    scheduler = make_scheduler(connector=connector, specs=(window(5),))
    add(scheduler, "a", range(18))
    output = scheduler.schedule()
    (table,) = output.scheduled_new_reqs[0].block_ids
    scheduler.finish_requests(["a"])
    failed = {"invalid_block_ids": frozenset({table[2]})}
    scheduler.update_from_output(output, answer({"a": [7]}, transfers=failed))
    connector.chains.clear()
    # Block 3 was computed from block 2. Token 16 would read only block 3.
    add(scheduler, "b", range(18))
    assert counts(scheduler.schedule()) == {"b": 18}
    scheduler.check_invariants()


def test_blocks_that_a_preempted_request_computed_from_a_load_in_flight_are_not_cached():
    connector = InMemoryConnector()
    connector.store(PROMPT)
    scheduler = make_scheduler(AsyncScheduler, connector=connector, num_blocks=7)
    add(scheduler, "old", 8, max_tokens=5)
    add(scheduler, "a", PROMPT, max_tokens=5)
    first = scheduler.schedule()
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    failed = {"invalid_block_ids": frozenset({blocks[1].block_id})}
    # "old" gets the last of the 4 blocks of "a" before the second is known to be invalid.
    second = scheduler.schedule()
    assert (counts(second), second.preempted_req_ids) == ({"old": 1}, {"a"})
    scheduler.update_from_output(first, answer({"old": [7], "a": [7]}, transfers=failed))
    assert [block.block_hash for block in blocks[:3]] == [None] * 3
    scheduler.check_invariants()


def test_after_a_failed_load_with_a_window_all_tokens_are_computed():
    connector = InMemoryConnector(is_async=True)
    connector.store(range(12))
    scheduler = make_scheduler(connector=connector, specs=(window(5),))
    request = add(scheduler, "a", range(18))
    output = scheduler.schedule()
    (load,) = output.kv_connector_metadata.loads
    scheduler.update_from_output(
        output, answer({}, transfers={"invalid_block_ids": frozenset({load.block_ids[0][2]})})
    )
    output = scheduler.schedule()
    ended = {"finished_recving": frozenset({"a"})}
    scheduler.update_from_output(output, answer({}, transfers=ended))
    connector.chains.clear()
    # 8 tokens were loaded, but the blocks that token 8 would read were not.
    output = scheduler.schedule()
    scheduler.check_invariants()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    assert (counts(output), request.num_computed_tokens) == ({"a": 18}, 18)
