"""The random workload meets everything that it promises, and breaks no rule on its way."""

from collections import Counter

import pytest

from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.trace.calls import AddRequestCall, Call, ControlCall, ScheduleCall
from paxkv.trace.recorder import make_recorder
from tests.end_to_end.random_workload import RandomWorkload, make_header


def run_workload(*, num_requests: int, seed: int, check_every: int, **header: object) -> list[Call]:
    calls: list[Call] = []

    def make(connector, grammar_gate):
        return make_recorder(
            make_header(**header),
            make_scheduler,
            calls.append,
            connector=connector,
            grammar_gate=grammar_gate,
        )

    workload = RandomWorkload(make, num_requests=num_requests, seed=seed)
    while not workload.is_done:
        workload.step()
        if workload.num_steps % check_every == 0:
            workload.scheduler.check_invariants()
    workload.run()
    pool = workload.scheduler.kv_cache_manager.block_pool
    kept = [request.request_id for request in workload.scheduler.kept_requests]
    workload.scheduler.finish_requests(kept)
    assert pool.get_num_free_blocks() == pool.num_blocks - 1
    return calls


def test_workload_meets_everything_that_makes_decisions_hard() -> None:
    calls = run_workload(num_requests=600, seed=0, check_every=50)
    seen: Counter[str] = Counter()
    for call in calls:
        match call:
            case AddRequestCall():
                seen["fork"] += call.engine_request().fork_from is not None
            case ControlCall():
                seen[f"reset {call.arguments[0]}"] += 1
            case ScheduleCall(decision=decision):
                seen["preempted"] += len(decision.preempted)
                seen["resumed"] += len(decision.resumed)
                seen["drafts"] += len(decision.spec_decode_tokens)
                seen["encoded"] += len(decision.encoder_inputs)
                seen["copied"] += len(decision.block_copies)
                seen["hits"] += sum(row.num_computed_tokens > 0 for row in decision.new)
        for question in call.questions:
            if question.answer not in (None, False, (0, False)):
                seen[question.method] += 1
        if call.moved is not None:
            seen["evicted"] += len(call.moved.evicted)
    wanted = "fork preempted resumed drafts encoded copied hits evicted get_num_new_matched_tokens "
    wanted += "request_finished is_ready"
    assert {name for name in wanted.split() if not seen[name]} == set()
    assert seen["reset True"] > 0 and seen["reset False"] > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
def test_rules_hold_after_every_step(policy: str, is_async: bool) -> None:
    run_workload(num_requests=60, seed=1, check_every=1, policy=policy, is_async=is_async)
