"""A KV connector: synchronous and asynchronous loads, failures, saves, and delayed freeing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.request import RequestStatus
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector, MemoryRunner
from tests.paxkv.scheduler.stepping import (
    FULL,
    add,
    answer,
    check_progress,
    continuation,
    counts,
    ids,
    make_scheduler,
    step,
    window,
)

PROMPT = list(range(14))


def make(*, stored=PROMPT, is_async=False, delays_free=False, **settings):
    connector = InMemoryConnector(is_async=is_async, delays_free=delays_free)
    connector.store(stored)
    return make_scheduler(connector=connector, **settings), MemoryRunner(connector), connector


def finish(scheduler, runner):
    """Runs all requests to their end; every transfer ends in the step after it began."""
    for _ in range(200):
        if not scheduler.has_unfinished_requests() and not runner.saving:
            return
        loaded, saved = list(runner.loading), list(runner.saving)
        for request_id in loaded:
            runner.load(request_id)
        for request_id in saved:
            runner.save(request_id)
        transfers = {"finished_recving": frozenset(loaded), "finished_sending": frozenset(saved)}
        step(scheduler, runner, transfers=transfers)
    raise AssertionError("requests that never finish")


def test_a_step_computes_the_tokens_after_a_synchronous_load():
    scheduler, runner, _ = make()
    add(scheduler, "a", PROMPT, max_tokens=3)
    output = step(scheduler, runner)
    assert isinstance(scheduler.remote_kv, RemoteKV)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 12
    assert counts(output) == {"a": 2}
    (load,) = output.kv_connector_metadata.loads
    assert (load.start_token_idx, load.num_tokens) == (0, 12)
    # Other requests may hit loaded blocks, even in the same step.
    add(scheduler, "b", PROMPT, max_tokens=1)
    output = step(scheduler, runner)
    assert output.kv_connector_metadata.loads == []
    assert output.scheduled_new_reqs[0].num_computed_tokens == 12
    finish(scheduler, runner)
    assert runner.token_ids["a"][14:] == continuation(PROMPT, 3)


def test_a_synchronous_load_excludes_the_last_token():
    scheduler, runner, _ = make(stored=PROMPT[:12])
    add(scheduler, "a", PROMPT[:12], max_tokens=1)
    output = step(scheduler, runner)
    assert counts(output) == {"a": 1}
    assert output.kv_connector_metadata.loads[0].num_tokens == 11


def test_a_request_with_an_asynchronous_load_holds_blocks_and_gets_no_tokens():
    scheduler, runner, _ = make(is_async=True)
    request = add(scheduler, "a", PROMPT, max_tokens=3)
    add(scheduler, "b", 3, max_tokens=9)
    output = step(scheduler, runner)
    assert counts(output) == {"b": 3}
    assert (request.status, request.num_computed_tokens) == (
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        0,
    )
    (table,) = scheduler.kv_cache_manager.get_block_ids("a")
    assert len(table) == 3
    # Blocks that are not loaded yet are not hits.
    assert scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 0
    assert ids(scheduler.waiting) == ["a"]
    assert not scheduler.reset_prefix_cache(True)
    assert ids(scheduler.running) == ["b"]
    step(scheduler, runner)
    runner.load("a")
    assert counts(step(scheduler, runner, transfers={"finished_recving": frozenset("a")})) == {
        "b": 1
    }
    output = step(scheduler, runner)
    assert counts(output) == {"b": 1, "a": 2}
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, new.block_ids[0][:3]) == (12, table)
    assert request.num_cached_tokens == 12
    finish(scheduler, runner)
    assert runner.token_ids["a"][14:] == continuation(PROMPT, 3)


def test_after_an_asynchronous_load_the_last_token_is_computed():
    scheduler, runner, _ = make(stored=PROMPT[:12], is_async=True)
    add(scheduler, "a", PROMPT[:12], max_tokens=2)
    step(scheduler, runner)
    finish(scheduler, runner)
    assert runner.token_ids["a"][12:] == continuation(PROMPT[:12], 2)


def test_an_undecided_connector_is_asked_again_without_blocking_requests():
    scheduler, runner, connector = make()
    connector.undecided = {"a"}
    add(scheduler, "a", PROMPT, max_tokens=1)
    add(scheduler, "b", 3, max_tokens=1)
    assert counts(step(scheduler, runner)) == {"b": 3}
    assert ids(scheduler.waiting) == ["a"]
    assert counts(step(scheduler, runner)) == {}
    connector.undecided = set()
    assert counts(step(scheduler, runner)) == {"a": 2}


def test_blocks_of_a_request_aborted_while_loading_are_freed_after_the_load():
    scheduler, runner, _ = make(is_async=True)
    add(scheduler, "a", PROMPT)
    step(scheduler, runner)
    scheduler.finish_requests(["a"])
    scheduler.check_invariants()
    assert scheduler.make_stats().num_free_blocks == 99 - 3
    with pytest.raises(InvalidRequestError, match="'a' is taken"):
        add(scheduler, "a", 3)
    runner.load("a")
    assert step(scheduler, runner, transfers={"finished_recving": frozenset("a")}).finished_req_ids
    assert scheduler.make_stats().num_free_blocks == 99
    add(scheduler, "a", 3)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_blocks_of_a_request_aborted_after_loading_are_freed_immediately(num_steps):
    scheduler, runner, _ = make(is_async=True)
    add(scheduler, "a", PROMPT)
    step(scheduler, runner)
    runner.load("a")
    step(scheduler, runner, transfers={"finished_recving": frozenset("a")})
    for _ in range(num_steps):
        step(scheduler, runner)
    scheduler.finish_requests(["a"])
    scheduler.check_invariants()
    assert scheduler.make_stats().num_free_blocks == 99


def test_blocks_of_a_finished_request_are_held_until_they_are_saved():
    scheduler, runner, connector = make(stored=[], delays_free=True)
    add(scheduler, "a", PROMPT, max_tokens=3)
    for _ in range(3):
        step(scheduler, runner)
    assert not scheduler.has_unfinished_requests()
    # 16 computed tokens are in 4 blocks.
    assert scheduler.make_stats().num_free_blocks == 99 - 4
    assert not scheduler.reset_prefix_cache(True)
    output = step(scheduler, runner)
    assert [save.num_tokens for save in output.kv_connector_metadata.saves] == [16]
    runner.save("a")
    step(scheduler, runner, transfers={"finished_sending": frozenset("a")})
    assert scheduler.make_stats().num_free_blocks == 99
    assert scheduler.reset_prefix_cache()
    scheduler.check_invariants()
    add(scheduler, "b", PROMPT, max_tokens=1)
    assert step(scheduler, runner).scheduled_new_reqs[0].num_computed_tokens == 12
    assert len(connector.chains) == 4


def test_a_reset_frees_blocks_loaded_for_a_waiting_request():
    scheduler, runner, _ = make(
        is_async=True, stored=PROMPT[:8], num_blocks=7, full_sequence_must_fit=False
    )
    add(scheduler, "b", range(50, 61), max_tokens=6)
    step(scheduler, runner)
    request = add(scheduler, "a", PROMPT, max_tokens=3)
    step(scheduler, runner)
    runner.load("a")
    # "b" gets the last of 6 blocks, so "a" has 8 tokens in 2 blocks and no room for more.
    step(scheduler, runner, transfers={"finished_recving": frozenset("a")})
    assert counts(step(scheduler, runner)) == {"b": 1}
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 8)
    assert not scheduler.reset_prefix_cache()
    assert request.num_computed_tokens == 8
    assert scheduler.reset_prefix_cache(True)
    assert request.num_computed_tokens == 0
    assert scheduler.make_stats().num_free_blocks == 6
    scheduler.check_invariants()


def test_the_end_of_a_transfer_that_never_began_raises():
    for transfers in ({"finished_recving": frozenset("x")}, {"finished_sending": frozenset("x")}):
        scheduler, runner, _ = make()
        with pytest.raises(InvariantError, match="'x'"):
            step(scheduler, runner, transfers=transfers)


def test_loaded_blocks_are_freed_when_no_request_could_run_otherwise():
    # Two prompts of 15 tokens are loaded into 3 of 7 blocks each. Each needs 2 more to finish.
    prompts = {name: [*range(i, i + 12), 1, 2, 3] for i, name in ((0, "a"), (50, "b"))}
    scheduler, runner, connector = make(
        stored=prompts["a"], is_async=True, num_blocks=8, full_sequence_must_fit=False
    )
    connector.store(prompts["b"])
    for name, prompt in prompts.items():
        add(scheduler, name, prompt, max_tokens=6)
    step(scheduler, runner)
    assert scheduler.make_stats().num_free_blocks == 1
    finish(scheduler, runner)
    for name, prompt in prompts.items():
        assert runner.token_ids[name][15:] == continuation(prompt, 6)
    assert scheduler.make_stats().num_free_blocks == 7


def test_loaded_blocks_do_not_block_their_own_request_when_no_request_runs():
    # Full attention and a window of 5: 40 tokens, 8 per step, need 10 and 4 blocks: the whole pool.
    prompt = list(range(40))
    scheduler, _, _ = make(
        stored=prompt[:12],
        is_async=True,
        specs=(FULL, window(5)),
        num_blocks=15,
        max_num_batched_tokens=8,
    )
    add(scheduler, "a", prompt, max_tokens=1)
    output = scheduler.schedule()
    loaded = {"finished_recving": frozenset("a")}
    scheduler.update_from_output(output, answer({}, transfers=loaded))
    for _ in range(4):
        output = scheduler.schedule()
        scheduler.check_invariants()
        check_progress(scheduler, output)
        tokens = [7] if scheduler.requests["a"].num_computed_tokens == 40 else []
        scheduler.update_from_output(output, answer({"a": tokens}))
    assert not scheduler.has_unfinished_requests()


@given(
    seed=st.integers(0, 2**32),
    is_async=st.booleans(),
    delays_free=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    must_fit=st.booleans(),
)
def test_random_traffic_reads_right_data(seed, is_async, delays_free, caching, policy, must_fit):
    draw = random.Random(seed)
    scheduler, runner, connector = make(
        stored=[],
        is_async=is_async,
        delays_free=delays_free,
        caching=caching,
        policy=policy,
        full_sequence_must_fit=must_fit,
        num_blocks=draw.randint(9, 20),
        max_num_batched_tokens=draw.randint(6, 20),
    )
    wanted, num_requests, num_steps = {}, 0, 0
    while (num_requests < 12 or scheduler.has_unfinished_requests()) and num_steps < 400:
        num_steps += 1
        if num_requests < 12 and draw.random() < 0.4:
            name = f"r{num_requests}"
            num_requests += 1
            prompt = [0, 1, 2, 3] * draw.randint(0, 4) + [draw.randrange(3)]
            max_tokens = draw.randint(1, 8)
            wanted[name] = continuation(prompt, max_tokens)
            add(
                scheduler,
                name,
                prompt,
                max_tokens=max_tokens,
                priority=draw.choice([0, -num_requests]),
            )
        if wanted and draw.random() < 0.1:
            scheduler.finish_requests([draw.choice(sorted(wanted))])
        loaded, saved, invalid = [], [], frozenset()
        for request_id in list(runner.loading):
            if draw.random() < 0.6:
                failed = [draw.randrange(4)] if draw.random() < 0.3 else []
                if request_id in scheduler.requests:
                    invalid |= runner.load(request_id, failed_blocks=failed)
                else:
                    runner.load(request_id)
                loaded.append(request_id)
        for request_id in list(runner.saving):
            if delays_free and draw.random() < 0.6:
                runner.save(request_id)
                saved.append(request_id)
        if not delays_free:
            runner.saving.clear()
        output = scheduler.schedule()
        scheduler.check_invariants()
        check_progress(scheduler, output)
        transfers = {
            "finished_recving": frozenset(loaded),
            "finished_sending": frozenset(saved) if delays_free else frozenset(),
            "invalid_block_ids": invalid,
        }
        failed_blocks = [draw.randrange(4)] if draw.random() < 0.2 else []
        result = runner.execute(output, transfers=transfers, failed_blocks=failed_blocks)
        for done in scheduler.update_from_output(output, result):
            if done.finish_reason is not None:
                tokens = wanted[done.request_id]
                assert runner.token_ids[done.request_id][-len(tokens) :] == tokens
        # The device discards tokens as the scheduler does.
        for request_id, request in scheduler.requests.items():
            if request_id in runner.token_ids:
                runner.token_ids[request_id] = list(request.all_token_ids)
        scheduler.check_invariants()
    assert not scheduler.has_unfinished_requests()
