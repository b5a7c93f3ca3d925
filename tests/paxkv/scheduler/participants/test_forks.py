"""Forks share the common tokens of two requests; finished sources are kept while there is room."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.scheduler.participants.forks import KeptRequests, num_shareable_tokens
from paxkv.scheduler.request import Request, RequestStatus
from tests.paxkv.scheduler.stepping import (
    FunctionRunner,
    add,
    continuation,
    counts,
    ids,
    make_scheduler,
    step,
    window,
)


def make_request(request_id="r", prompt=(1, 2, 3, 4, 5), *, params=None, **fields):
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**(params or {})),
            **fields,
        ),
        max_num_tokens=50,
    )


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 5),
        ([1, 2, 3, 4, 5], 4),  # the last token is the child's own
        ([1, 2, 9, 4, 5], 2),
        ([9], 0),
    ],
)
def test_common_tokens_are_shared_except_the_last_of_the_child(child, expected):
    assert num_shareable_tokens(make_request(), make_request(prompt=child)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "other"},
        {"cache_salt": "tenant"},
        {"params": {"skip_reading_prefix_cache": True}},
    ],
)
def test_requests_with_different_salt_adapter_or_cache_use_share_nothing(fields):
    assert num_shareable_tokens(make_request(), make_request(**fields)) == 0


def test_tokens_after_the_first_different_item_are_not_shared():
    def item(name, offset):
        return MultiModalFeature(identifier=name, offset=offset, length=1)

    source = make_request(mm_features=(item("x", 1), item("y", 3)))
    for items, expected in (
        ((item("x", 1), item("y", 3)), 4),
        ((item("x", 1), item("z", 3)), 3),
        ((item("x", 1),), 3),
        ((item("x", 1), item("y", 2)), 2),
        ((), 1),
    ):
        assert num_shareable_tokens(source, make_request(mm_features=items)) == expected


def test_the_oldest_kept_request_is_popped_first():
    kept = KeptRequests()
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        kept.add(request)
    assert kept.pop("b") is requests[1]
    assert kept.pop("b") is None
    assert [kept.pop_oldest(), kept.pop_oldest(), kept.pop_oldest()] == [
        requests[0],
        requests[2],
        None,
    ]


def test_a_fork_waits_for_its_source_without_blocking_other_requests():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    runner = FunctionRunner()
    prompt = list(range(10))
    add(scheduler, "a", prompt, max_tokens=5)
    for name in ("b", "c"):
        add(scheduler, name, prompt, max_tokens=5, fork_from="a")
    add(scheduler, "d", 1, max_tokens=9)
    # 8 of "a"; the forks need 9.
    output = scheduler.schedule()
    assert counts(output) == {"a": 8}
    scheduler.update_from_output(output, runner.execute(output))
    output = scheduler.schedule()
    assert counts(output) == {"a": 2, "d": 1}
    assert [scheduler.requests[name].status for name in "bc"] == [
        RequestStatus.WAITING_FOR_FORK
    ] * 2
    assert ids(scheduler.waiting) == ["b", "c"]
    scheduler.update_from_output(output, runner.execute(output))
    output = step(scheduler, runner)
    b, c = output.scheduled_new_reqs
    # Blocks 1 and 2 are shared; the third is partly filled, and each request writes its own copy.
    assert (b.req_id, b.num_computed_tokens, counts(output)["b"]) == ("b", 9, 1)
    (a_table,) = scheduler.kv_cache_manager.get_block_ids("a")
    assert [new.block_ids[0][:2] for new in (b, c)] == [a_table[:2]] * 2
    copies = [(copy.source_block_id, copy.target_block_id) for copy in output.block_copies]
    assert copies == [(a_table[2], b.block_ids[0][2]), (a_table[2], c.block_ids[0][2])]
    for _ in range(6):
        step(scheduler, runner)
    assert not scheduler.has_unfinished_requests() or ids(scheduler.running) == ["d"]
    assert scheduler.num_preemptions == 0


def test_a_source_calls_allocate_again_after_a_fork():
    scheduler, runner = make_scheduler(), FunctionRunner()
    source = add(scheduler, "a", range(9))
    step(scheduler, runner)
    assert source.max_tokens_before_allocate > source.num_tokens
    add(scheduler, "b", [*range(9), 99], fork_from="a")
    step(scheduler, runner)
    assert source.max_tokens_before_allocate == 0
    step(scheduler, runner)
    assert source.max_tokens_before_allocate > 0


def test_forks_use_fewer_blocks_than_copies():
    def peak(**fork):
        scheduler, runner = make_scheduler(caching=False), FunctionRunner()
        prompt = list(range(30))
        add(scheduler, "a", prompt, max_tokens=6)
        for name in "bcd":
            add(scheduler, name, prompt, max_tokens=6, **fork)
        most = 0
        while scheduler.has_unfinished_requests():
            step(scheduler, runner)
            stats = scheduler.make_stats()
            most = max(most, stats.num_blocks - 1 - stats.num_free_blocks)
        assert [runner.token_ids[name][30:] for name in "abcd"] == [continuation(prompt, 6)] * 4
        return most

    # 35 tokens need 9 blocks; 29 shared tokens fill 7 blocks.
    assert peak() == 36
    assert peak(fork_from="a") == 7 + 4 * 2


def test_forks_do_not_wait_for_an_ended_or_preempted_source():
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", range(10), max_tokens=5)
    add(scheduler, "b", range(10), max_tokens=5, fork_from="a")
    add(scheduler, "c", range(10), max_tokens=5, fork_from="unknown")
    scheduler.finish_requests(["a"])
    assert counts(step(scheduler, runner)) == {"b": 10, "c": 2}
    add(scheduler, "d", range(50, 60), max_tokens=5, fork_from="b")
    scheduler.reset_prefix_cache(True)
    # "b" resumes first; the blocks that it found may be written in the same step.
    assert "d" not in counts(step(scheduler, runner))
    assert counts(step(scheduler, runner))["d"] == 10


def test_a_fork_does_not_wait_for_a_preempted_source_to_run_again():
    scheduler, runner = make_scheduler(num_blocks=5, policy="priority"), FunctionRunner()
    add(scheduler, "a", 7, max_tokens=4)
    source = add(scheduler, "b", 7, max_tokens=4, priority=5)
    for _ in range(3):
        step(scheduler, runner)
    assert source.status is RequestStatus.PREEMPTED
    # One block is free: enough for the fork, but not for its source.
    prompt = [*source.prompt_token_ids[:3], 99]
    add(scheduler, "c", prompt, max_tokens=1, priority=1, fork_from="b")
    assert counts(step(scheduler, runner)) == {"a": 1, "c": 4}


def test_a_source_whose_blocks_left_the_window_is_not_shared():
    scheduler = make_scheduler(specs=(window(4),), caching=False)
    runner = FunctionRunner()
    add(scheduler, "a", range(16), max_tokens=9)
    for _ in range(2):
        step(scheduler, runner)
    # Both blocks that token 6 would read were freed.
    add(scheduler, "b", [*range(6), 99], max_tokens=2, fork_from="a")
    assert step(scheduler, runner).scheduled_new_reqs[0].num_computed_tokens == 0
    add(scheduler, "c", [*range(16), 99], max_tokens=2, fork_from="a")
    assert step(scheduler, runner).scheduled_new_reqs[0].num_computed_tokens == 16


def test_a_longer_prefix_hit_is_preferred_to_a_fork():
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "long", range(20), max_tokens=1)
    step(scheduler, runner)
    add(scheduler, "a", [*range(5), 99], max_tokens=9)
    step(scheduler, runner)
    add(scheduler, "b", range(20), max_tokens=1, fork_from="a")
    output = step(scheduler, runner)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    assert output.block_copies == []


def make_kept(**settings):
    scheduler, runner = make_scheduler(**settings), FunctionRunner()
    add(scheduler, "a", range(10), max_tokens=2, keep_blocks=True)
    for _ in range(2):
        step(scheduler, runner)
    assert not scheduler.has_unfinished_requests()
    return scheduler, runner


def test_forks_share_blocks_of_a_kept_source_after_its_end():
    scheduler, runner = make_kept(caching=False)
    assert scheduler.make_stats().num_free_blocks == 99 - 3
    first, second = continuation(range(10), 2)
    add(scheduler, "b", [*range(10), first, 77], max_tokens=2, fork_from="a")
    output = step(scheduler, runner)
    # 11 of its 12 tokens are computed, and shared.
    assert output.scheduled_new_reqs[0].num_computed_tokens == 11
    assert counts(output) == {"b": 1}
    scheduler.finish_requests(["a"])
    scheduler.check_invariants()
    step(scheduler, runner)
    assert scheduler.make_stats().num_free_blocks == 99


def test_an_aborted_request_keeps_no_blocks():
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", range(10), keep_blocks=True)
    step(scheduler, runner)
    scheduler.finish_requests(["a"])
    assert scheduler.make_stats().num_free_blocks == 99
    add(scheduler, "a", range(10), keep_blocks=True)
    step(scheduler, runner)
    scheduler.finish_requests(["a"], "stop")  # a stop string ends a request like any other end
    assert scheduler.make_stats().num_free_blocks == 99 - 3


def test_kept_blocks_are_freed_before_a_request_is_preempted_or_must_wait():
    scheduler, runner = make_kept(num_blocks=7)
    add(scheduler, "b", range(100, 112), max_tokens=3)
    # 3 blocks are free; the third token of "b" needs a fourth.
    assert counts(step(scheduler, runner)) == {"b": 12}
    assert len(scheduler.kept_requests) == 1
    output = step(scheduler, runner)
    assert (counts(output), output.preempted_req_ids) == ({"b": 1}, frozenset())
    assert len(scheduler.kept_requests) == 0

    scheduler, runner = make_kept(num_blocks=7)
    add(scheduler, "b", range(100, 114), max_tokens=3)
    assert counts(step(scheduler, runner)) == {"b": 14}
    assert len(scheduler.kept_requests) == 0


def test_a_fork_is_admitted_by_releasing_its_own_kept_source():
    scheduler, runner = make_kept(num_blocks=5, caching=False)
    tokens = continuation(range(10), 1)
    add(scheduler, "b", [*range(10), *tokens, 5, 6, 7], max_tokens=2, fork_from="a")
    # 4 blocks in all: 3 of the source, and 1 free. With a copy "b" would need 2.
    output = step(scheduler, runner)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 11
    assert (counts(output), output.block_copies) == ({"b": 3}, [])
    assert len(scheduler.kept_requests) == 0


def test_a_fork_without_room_for_the_block_copy_starts_without_sharing():
    scheduler, runner = make_kept(num_blocks=5)
    # All 4 blocks for its 16 tokens. It shares block 0 and half of block 1 with "a". Block 1 is
    # full and cached, so it needs a copy, which would be a fifth block.
    add(scheduler, "b", [*range(6), *range(50, 60)], max_tokens=1, fork_from="a")
    output = step(scheduler, runner)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 4
    assert (counts(output), output.block_copies) == ({"b": 12}, [])


def test_a_reset_or_a_reused_id_frees_kept_blocks():
    scheduler, _ = make_kept()
    add(scheduler, "a", 3)
    scheduler.check_invariants()
    assert len(scheduler.kept_requests) == 0
    scheduler, runner = make_kept()
    assert scheduler.reset_prefix_cache()
    assert scheduler.make_stats().num_free_blocks == 99
    add(scheduler, "b", range(10), max_tokens=1, fork_from="a")
    assert step(scheduler, runner).scheduled_new_reqs[0].num_computed_tokens == 0
