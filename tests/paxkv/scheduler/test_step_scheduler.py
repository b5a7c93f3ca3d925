"""Running requests get tokens or are preempted; waiting requests are admitted or skipped."""

import pytest

from paxkv.contracts.engine_request import MultiModalFeature
from paxkv.errors import InvalidRequestError
from paxkv.scheduler.request import RequestStatus
from paxkv.scheduler.step_scheduler import StepScheduler
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


def make_decoding(prompt=range(5), **settings):
    """One request "a" whose prompt is computed and that has one sampled token."""
    scheduler, runner = make_scheduler(**settings), FunctionRunner()
    request = add(scheduler, "a", list(prompt))
    step(scheduler, runner)
    return scheduler, runner, request


def test_rejected_drafts_do_not_count_as_computed():
    scheduler, runner, request = make_decoding()
    right = continuation(range(5), 8)
    step(scheduler, runner, drafts={"a": [right[2], right[3], 999]})
    assert request.num_tokens_with_spec == 7 + 3
    output = step(scheduler, runner)
    assert output.scheduled_spec_decode_tokens == {"a": [right[2], right[3], 999]}
    assert counts(output) == {"a": 4}
    # 7 known tokens. Positions 6, 7 and 8 have right tokens, position 9 a wrong one.
    assert request.all_token_ids[5:] == right[:5]
    assert request.num_computed_tokens == 9
    output = step(scheduler, runner)
    assert (counts(output), output.scheduled_spec_decode_tokens) == ({"a": 1}, {})


def test_drafts_are_never_cached():
    scheduler, runner, request = make_decoding(prompt=range(6))
    step(scheduler, runner, drafts={"a": [901, 902, 903, 904]})
    # 8 known tokens and 4 drafts: blocks 0 and 1 are full of known tokens, block 2 is not.
    output = scheduler.schedule()
    assert counts(output) == {"a": 5}
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    assert [block.block_hash is not None for block in blocks] == [True, True, False]
    scheduler.check_invariants()
    scheduler.update_from_output(output, runner.execute(output))
    assert request.num_computed_tokens == 8
    scheduler.check_invariants()


def test_drafts_past_the_budget_or_the_last_token_are_dropped():
    scheduler, runner, _ = make_decoding(max_num_batched_tokens=6)
    add(scheduler, "b", 9)
    drafts = {"a": [91, 92, 93, 94, 95, 96, 97]}
    step(scheduler, runner, drafts=drafts)
    output = step(scheduler, runner)
    assert output.scheduled_spec_decode_tokens == {"a": [91, 92, 93, 94, 95]}
    assert counts(output) == {"a": 6}

    scheduler, runner, request = make_decoding(max_model_len=9)
    step(scheduler, runner, drafts=drafts)
    output = step(scheduler, runner)
    # Position 7 is the last computed position: position 8 would only be sampled.
    assert output.scheduled_spec_decode_tokens == {"a": [91]}
    assert request.num_computed_tokens <= 8


def test_drafts_of_a_finished_request_or_a_partial_prompt_are_not_kept():
    scheduler, runner = make_scheduler(max_num_batched_tokens=4), FunctionRunner()
    long = add(scheduler, "long", 9)
    step(scheduler, runner, drafts={"long": [1, 2]})
    assert long.spec_token_ids == []
    scheduler, runner = make_scheduler(), FunctionRunner()
    request = add(scheduler, "a", 3, max_tokens=1)
    step(scheduler, runner, drafts={"a": [1, 2]})
    assert request.is_finished
    assert request.spec_token_ids == []


def test_tokens_after_a_stop_among_accepted_drafts_are_dropped():
    right = continuation(range(5), 8)
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", range(5), params={"stop_token_ids": [right[3]]}, keep_blocks=True)
    step(scheduler, runner)
    step(scheduler, runner, drafts={"a": right[2:6]})
    output = scheduler.schedule()
    (result,) = scheduler.update_from_output(output, runner.execute(output))
    assert (result.new_token_ids, result.stop_reason) == (right[2:4], right[3])
    # Forks do not count tokens that were computed past the end.
    (kept,) = scheduler.kept_requests
    assert kept.num_computed_tokens == kept.num_tokens == 9
    scheduler.check_invariants()


def test_a_preempted_request_loses_its_drafts():
    scheduler = make_scheduler(num_blocks=5)
    runner = FunctionRunner()
    add(scheduler, "a", 7, max_tokens=6)
    victim = add(scheduler, "b", 7, max_tokens=6)
    step(scheduler, runner)
    step(scheduler, runner, drafts={"b": [1, 2]})
    output = step(scheduler, runner)
    assert output.preempted_req_ids == {"b"}
    assert victim.spec_token_ids == []
    assert "b" not in output.scheduled_spec_decode_tokens


def test_running_requests_have_lookahead_slots():
    scheduler, runner, _ = make_decoding(num_lookahead_tokens=4)
    # Its first step has no drafts: 5 tokens in 2 blocks.
    assert [len(table) for table in scheduler.kv_cache_manager.get_block_ids("a")] == [2]
    step(scheduler, runner)
    # 6 tokens and 4 slots: 3 blocks of 4.
    assert [len(table) for table in scheduler.kv_cache_manager.get_block_ids("a")] == [3]


@pytest.mark.parametrize("settings", [{}, {"specs": (window(5),)}, {"caching": False}])
def test_a_decode_in_the_middle_of_a_block_does_not_call_the_manager(settings, monkeypatch):
    scheduler, runner = make_scheduler(**settings), FunctionRunner()
    request = add(scheduler, "a", 5, max_tokens=40)
    called_at = []
    allocate_slots = scheduler.kv_cache_manager.allocate_slots

    def count(asked, num_new_tokens, **arguments):
        called_at.append(asked.num_computed_tokens)
        return allocate_slots(asked, num_new_tokens, **arguments)

    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", count)
    for _ in range(30):
        step(scheduler, runner)
    assert request.num_computed_tokens == 34
    # A block begins at each multiple of 4, and is full 3 tokens later. Other tokens need no call.
    wanted = {8, 12, 16, 20, 24, 28, 32}
    assert wanted <= set(called_at)
    assert not {at for at in called_at if at % 4 == 2}


def test_an_item_that_cannot_be_encoded_yet_ends_the_chunk():
    items = (
        MultiModalFeature(identifier="x", offset=1, length=4),
        MultiModalFeature(identifier="y", offset=6, length=5),
    )
    scheduler = make_scheduler(
        max_num_encoder_input_tokens=5, encoder_cache_size=5, max_num_batched_tokens=8
    )
    runner = FunctionRunner()
    add(scheduler, "a", 13, mm_features=items)
    outputs = [step(scheduler, runner) for _ in range(4)]
    # Tokens 0..5 with "x"; 6..12 with "y", when the cache has room again.
    assert [counts(output).get("a") for output in outputs] == [6, 7, 1, 1]
    assert [output.scheduled_encoder_inputs for output in outputs[:3]] == [
        {"a": [0]},
        {"a": [1]},
        {},
    ]
    assert [output.free_encoder_mm_hashes for output in outputs[:2]] == [[], ["x"]]


def test_preemption_returns_encoder_budget_and_passes_a_shared_item_on():
    shared = MultiModalFeature(identifier="x", offset=4, length=4)
    scheduler = make_scheduler(
        num_blocks=9,
        policy="priority",
        max_num_batched_tokens=17,
        long_prefill_token_threshold=4,
        max_num_encoder_input_tokens=4,
    )
    runner = FunctionRunner()
    add(scheduler, "low", 24, priority=5, max_tokens=1, mm_features=(shared,))
    add(scheduler, "mid", 24, priority=1, max_tokens=1, mm_features=(shared,))
    add(scheduler, "high", 7, priority=0, max_tokens=2)
    step_1 = scheduler.schedule()
    scheduler.update_from_output(step_1, runner.execute(step_1))
    assert ids(scheduler.running) == ["high", "mid", "low"]
    # "low" is scheduled first and encodes "x", and "mid" uses it too.
    scheduler.running.reverse()
    taken = scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"low"}
    assert output.scheduled_encoder_inputs == {"mid": [0]}
    scheduler.encoder_inputs.cache_manager.check_invariants(scheduler.requests)
    scheduler.kv_cache_manager.block_pool.free_blocks(taken)


def test_an_item_of_a_preempted_request_is_encoded_for_the_preempting_request():
    shared = MultiModalFeature(identifier="x", offset=4, length=4)
    scheduler = make_scheduler(
        num_blocks=9,
        policy="priority",
        long_prefill_token_threshold=4,
        max_num_encoder_input_tokens=4,
    )
    runner = FunctionRunner()
    add(scheduler, "low", 24, priority=5, max_tokens=1, mm_features=(shared,))
    add(scheduler, "mid", 24, priority=1, max_tokens=1, mm_features=(shared,))
    step(scheduler, runner)
    # "low" is scheduled first, and gets the one free block.
    scheduler.running.reverse()
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    output = scheduler.schedule()
    assert (counts(output), output.preempted_req_ids) == ({"mid": 4}, {"low"})
    assert output.scheduled_encoder_inputs == {"mid": [0]}
    pool.free_blocks(taken)


def test_a_reset_does_not_cancel_items_of_a_step_in_flight():
    item = MultiModalFeature(identifier="x", offset=0, length=4)
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", 5, max_tokens=2, mm_features=(item,))
    output = scheduler.schedule()
    assert scheduler.reset_prefix_cache(True)
    assert output.scheduled_encoder_inputs == {"a": [0]}
    scheduler.update_from_output(output, runner.execute(output))
    # The runner has the item already.
    assert step(scheduler, runner).scheduled_encoder_inputs == {}


def test_reset_queues_running_requests_in_the_order_in_which_they_ran():
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, 3, max_tokens=4)
    step(scheduler, FunctionRunner())
    assert [request.request_id for request in scheduler.running] == ["a", "b", "c"]
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert list(scheduler.running) == []
    assert [request.request_id for request in scheduler.waiting] == ["a", "b", "c"]
    scheduler.check_invariants()


def test_finished_requests_are_removed_from_running():
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_tokens=1)
    add(scheduler, "b", 3, max_tokens=2)
    step(scheduler, FunctionRunner())
    assert [request.request_id for request in scheduler.running] == ["b"]


class Grammars:
    def __init__(self, *ready):
        self.ready = set(ready)

    def is_ready(self, request_id):
        return request_id in self.ready


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_waits_for_its_grammar_is_skipped_and_keeps_its_place(policy):
    gate = Grammars()
    scheduler = make_scheduler(grammar_gate=gate, policy=policy, max_num_seqs=1)
    runner = FunctionRunner()
    for i, request_id in enumerate("abcd"):
        add(
            scheduler,
            request_id,
            3,
            max_tokens=1,
            arrival_time=float(i),
            needs_grammar=request_id in "ab",
        )
    assert scheduler.requests["a"].status is RequestStatus.WAITING_FOR_FSM
    assert counts(step(scheduler, runner)) == {"c": 3}
    # Both keep their places in the queue.
    assert ids(scheduler.waiting) == ["a", "b", "d"]
    gate.ready = {"b"}
    assert counts(step(scheduler, runner)) == {"b": 3}
    assert ids(scheduler.waiting) == ["a", "d"]
    assert counts(step(scheduler, runner)) == {"d": 3}
    output = step(scheduler, runner)  # an empty step, which is legitimate
    assert (counts(output), scheduler.may_schedule_nothing()) == ({}, True)
    gate.ready = {"a"}
    assert counts(step(scheduler, runner)) == {"a": 3}


def test_a_grammar_without_a_grammar_gate_is_rejected():
    with pytest.raises(InvalidRequestError, match="compiles no grammars"):
        add(make_scheduler(), "a", 3, needs_grammar=True)


def test_a_pooled_request_cannot_have_a_grammar():
    scheduler = make_scheduler(grammar_gate=Grammars())
    with pytest.raises(InvalidRequestError, match="samples no token, so it cannot have a grammar"):
        add(scheduler, "a", 3, needs_grammar=True, is_pooled=True)
    assert not scheduler.requests


def test_a_whole_prompt_must_fit_unless_the_setting_is_off():
    def admitted(**config):
        scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, **config)
        add(scheduler, "a", 8, max_tokens=2)
        runner = FunctionRunner()
        step(scheduler, runner)
        # 2 of 5 blocks are held. The first 7 tokens fit in 3 blocks, but all 14 tokens do not.
        add(scheduler, "b", 14, max_tokens=2)
        return counts(step(scheduler, runner))

    assert admitted() == {"a": 1}
    assert admitted(full_sequence_must_fit=False) == {"a": 1, "b": 7}


def test_a_request_that_does_not_fit_ends_the_scan_without_preemption():
    scheduler = make_scheduler(num_blocks=6)
    runner = FunctionRunner()
    add(scheduler, "a", 8, max_tokens=3)
    step(scheduler, runner)
    add(scheduler, "big", 16, max_tokens=2)
    add(scheduler, "small", 1, max_tokens=2)
    output = step(scheduler, runner)
    assert (counts(output), output.preempted_req_ids) == ({"a": 1}, frozenset())
    assert ids(scheduler.waiting) == ["big", "small"]


def test_a_waiting_request_whose_item_cannot_be_encoded_ends_the_scan():
    def item(name):
        return (MultiModalFeature(identifier=name, offset=0, length=3),)

    scheduler = make_scheduler(max_num_encoder_input_tokens=3, encoder_cache_size=8)
    runner = FunctionRunner()
    for name in ("x", "y", "z"):
        add(scheduler, name, 5, max_tokens=1, mm_features=item(name))
    add(scheduler, "text", 2, max_tokens=1)
    outputs = [step(scheduler, runner) for _ in range(3)]
    assert [counts(output) for output in outputs] == [{"x": 5}, {"y": 5}, {"z": 5, "text": 2}]
    assert outputs[1].scheduled_encoder_inputs == {"y": [0]}
    # 8 tokens have room for two items of 3; "x" was evicted for "z".
    assert [output.free_encoder_mm_hashes for output in outputs] == [[], [], ["x"]]
    add(scheduler, "again", 5, max_tokens=1, mm_features=item("y"))
    assert step(scheduler, runner).scheduled_encoder_inputs == {}


def test_a_step_is_empty_while_the_pool_has_no_room():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 12, max_tokens=3)
    lost = scheduler.kv_cache_manager.block_pool.get_new_blocks(4)
    assert scheduler.schedule().num_scheduled_tokens == {} and not scheduler.may_schedule_nothing()
    scheduler.kv_cache_manager.block_pool.free_blocks(lost)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 12}


def test_no_request_is_admitted_after_a_preemption(monkeypatch):
    scheduler = make_scheduler(num_blocks=5)
    runner = FunctionRunner()
    add(scheduler, "a", 7, max_tokens=4)
    add(scheduler, "b", 7, max_tokens=4)
    called = []
    admit = StepScheduler.schedule_waiting
    monkeypatch.setattr(
        StepScheduler, "schedule_waiting", lambda self, plan: called.append(1) or admit(self, plan)
    )
    outputs = [step(scheduler, runner) for _ in range(3)]
    assert outputs[2].preempted_req_ids == {"b"}
    assert len(called) == 2


def test_a_request_that_ends_after_a_reset_is_reported_only_as_finished():
    scheduler, runner = make_scheduler(), FunctionRunner()
    for name in "ab":
        add(scheduler, name, 6, max_tokens=4)
    step(scheduler, runner)
    assert scheduler.reset_prefix_cache(True)
    scheduler.finish_requests(["a"])
    output = step(scheduler, runner)
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, {"b"})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_reset_preempts_running_requests_and_keeps_their_order(policy):
    scheduler = make_scheduler(policy=policy, max_num_seqs=2)
    runner = FunctionRunner()
    for i, request_id in enumerate("abc"):
        add(scheduler, request_id, 6, max_tokens=4, arrival_time=float(i))
    step(scheduler, runner)
    assert not scheduler.reset_prefix_cache()
    assert ids(scheduler.running) == ["a", "b"]
    assert scheduler.reset_prefix_cache(True)
    scheduler.check_invariants()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([], ["a", "b", "c"])
    output = step(scheduler, runner)
    # Both resume in the next step and compute all tokens again. The preemptions are reported.
    assert output.preempted_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.num_computed_tokens == [0, 0]
    assert counts(output) == {"a": 7, "b": 7}
    assert step(scheduler, runner).preempted_req_ids == frozenset()
