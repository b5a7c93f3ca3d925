"""Request times are sent once, with the first token; every request is forgotten."""

import pytest

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.engine_request import AbortRequests, AddRequest
from paxkv.engine import request_clock
from paxkv.engine.request_clock import RequestClock
from tests.paxkv.engine.fake_engine import make_engine_core, make_request


@pytest.fixture
def clock(monkeypatch):
    now = [1.0]
    monkeypatch.setattr(request_clock.time, "perf_counter", lambda: now[0])
    return now


def _output(request_id, *token_ids):
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(token_ids))


def test_queue_time_ends_at_the_first_step_and_prefill_at_the_first_token(clock):
    times = RequestClock()
    times.record_added("a")
    clock[0] = 3.0
    times.record_scheduled(["a"])
    clock[0] = 5.0
    # A preempted request is scheduled again, but only its first step counts.
    times.record_scheduled(["a"])
    clock[0] = 8.0
    (found,) = times.pop_first_token_times([_output("b", 1), _output("a", 1)]).values()
    assert (found.queue_s, found.prefill_s) == (2.0, 5.0)
    assert times.pop_first_token_times([_output("a", 2)]) == {}


def test_refused_and_aborted_requests_have_no_times_and_are_forgotten(clock):
    times = RequestClock()
    for name in ("refused", "aborted"):
        times.record_added(name)
    times.record_scheduled(["aborted"])
    assert times.pop_first_token_times([_output("refused")]) == {}
    times.forget(["aborted", "unknown"])
    assert times.pop_first_token_times([_output("aborted", 1), _output("refused", 1)]) == {}


def test_engine_sends_the_times_only_with_the_first_token():
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5, 6, 7], max_tokens=3)))
    core.handle(AddRequest(request=make_request("b", [5, 6, 7], max_tokens=3)))
    core.handle(AbortRequests(request_ids=["b"]))
    steps = []
    while core.has_work:
        steps.append(core.step())
    with_times = [step for step in steps if step.request_times]
    assert [list(step.request_times) for step in with_times] == [["a"]]
    times = with_times[0].request_times["a"]
    assert times.queue_s > 0 and times.prefill_s > 0


def test_engine_counts_steps_by_their_tokens_and_says_when_it_started():
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5] * 20, max_tokens=4)))
    while core.has_work:
        stats = core.step().stats
    # One step of 20 tokens, in (16, 32], and three of one, in (0, 1].
    assert stats.step_token_counts[:6] == (3, 0, 0, 1, 0, 0)
    assert sum(stats.step_token_counts) == 4
    assert stats.num_scheduled_tokens == 23
    assert stats.engine_start_time > 1.7e9
