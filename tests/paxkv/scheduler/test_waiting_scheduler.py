"""Waiting requests: who is let in, who is passed over and keeps its place, who ends the scan."""

import pytest

from paxkv.contracts.engine_request import MultiModalFeature
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.scheduler.request import RequestStatus
from paxkv.scheduler.waiting_scheduler import WaitingScheduler
from tests.paxkv.scheduler.stepping import FunctionRunner, add, counts, ids, make_scheduler, step


class Grammars:
    def __init__(self, *ready):
        self.ready = set(ready)

    def is_ready(self, request_id):
        return request_id in self.ready


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_without_its_grammar_is_passed_and_keeps_its_place(policy):
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
    # Both stand where they stood, in their old order.
    assert ids(scheduler.waiting) == ["a", "b", "d"]
    gate.ready = {"b"}
    assert counts(step(scheduler, runner)) == {"b": 3}
    assert ids(scheduler.waiting) == ["a", "d"]
    assert counts(step(scheduler, runner)) == {"d": 3}
    output = step(scheduler, runner)  # nothing to do, and no one's fault
    assert (counts(output), scheduler.is_waiting_for_outside()) == ({}, True)
    gate.ready = {"a"}
    assert counts(step(scheduler, runner)) == {"a": 3}


def test_a_grammar_that_nobody_compiles_is_refused():
    with pytest.raises(InvalidRequestError, match="compiles no grammars"):
        add(make_scheduler(), "a", 3, needs_grammar=True)


def test_a_whole_prompt_must_fit_unless_that_is_turned_off():
    def admitted(**config):
        scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, **config)
        add(scheduler, "a", 8, max_tokens=2)
        runner = FunctionRunner()
        step(scheduler, runner)
        # 2 of 5 blocks are taken; the first piece of 7 tokens fits in 3, all 14 tokens do not.
        add(scheduler, "b", 14, max_tokens=2)
        return counts(step(scheduler, runner))

    assert admitted() == {"a": 1}
    assert admitted(full_sequence_must_fit=False) == {"a": 1, "b": 7}


def test_who_does_not_fit_ends_the_scan_and_preempts_nobody():
    scheduler = make_scheduler(num_blocks=6)
    runner = FunctionRunner()
    add(scheduler, "a", 8, max_tokens=3)
    step(scheduler, runner)
    add(scheduler, "big", 16, max_tokens=2)
    add(scheduler, "small", 1, max_tokens=2)
    output = step(scheduler, runner)
    assert (counts(output), output.preempted_req_ids) == ({"a": 1}, frozenset())
    assert ids(scheduler.waiting) == ["big", "small"]


def test_an_item_that_cannot_be_encoded_now_ends_the_scan():
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
    # 8 tokens keep two items of 3; "x" made room for "z".
    assert [output.free_encoder_mm_hashes for output in outputs] == [[], [], ["x"]]
    add(scheduler, "again", 5, max_tokens=1, mm_features=item("y"))
    assert step(scheduler, runner).scheduled_encoder_inputs == {}


def test_a_request_that_waits_for_nothing_and_gets_nothing_is_an_error():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 12, max_tokens=3)
    lost = scheduler.kv_cache_manager.block_pool.get_new_blocks(4)
    output = scheduler.schedule()
    with pytest.raises(InvariantError, match="nothing runs, though something could"):
        scheduler.check_progress(output)
    scheduler.kv_cache_manager.block_pool.free_blocks(lost)
    scheduler.check_progress(scheduler.schedule())


def test_the_second_half_is_skipped_after_a_preemption(monkeypatch):
    scheduler = make_scheduler(num_blocks=5)
    runner = FunctionRunner()
    add(scheduler, "a", 7, max_tokens=4)
    add(scheduler, "b", 7, max_tokens=4)
    called = []
    admit = WaitingScheduler.schedule
    monkeypatch.setattr(
        WaitingScheduler, "schedule", lambda self, plan: called.append(1) or admit(self, plan)
    )
    outputs = [step(scheduler, runner) for _ in range(3)]
    assert outputs[2].preempted_req_ids == {"b"}
    assert len(called) == 2


def test_who_ends_after_a_reset_is_only_reported_as_ended():
    scheduler, runner = make_scheduler(), FunctionRunner()
    for name in "ab":
        add(scheduler, name, 6, max_tokens=4)
    step(scheduler, runner)
    assert scheduler.reset_prefix_cache(True)
    scheduler.finish_requests(["a"])
    output = step(scheduler, runner)
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, {"b"})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_reset_preempts_who_runs_and_keeps_their_order(policy):
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
    # They come back at once, compute everything anew, and the runner hears of both.
    assert output.preempted_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.num_computed_tokens == [0, 0]
    assert counts(output) == {"a": 7, "b": 7}
    assert step(scheduler, runner).preempted_req_ids == frozenset()
