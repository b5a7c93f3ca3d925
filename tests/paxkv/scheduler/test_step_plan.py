"""StepPlan: records the decisions of a step, and takes back those for a preempted request."""

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.kv_cache.manager import KVCacheBlocks
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.scheduler.request import Request
from paxkv.scheduler.step_plan import StepPlan


def make_request(request_id, *, num_computed_tokens=0, num_output_tokens=0):
    request = Request(
        EngineRequest(
            request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams()
        ),
        max_num_tokens=20,
    )
    request.num_computed_tokens = num_computed_tokens
    for _ in range(num_output_tokens):
        request.append_output_tokens([9])
    return request


def blocks(*block_ids):
    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in block_ids],))


def run(plan, request, num_new_tokens, new_blocks=None):
    """Plans a running request as the scheduler does."""
    plan.running[request.request_id] = request
    plan.num_scheduled_tokens[request.request_id] = num_new_tokens
    plan.token_budget -= num_new_tokens
    if new_blocks is not None:
        plan.blocks[request.request_id] = new_blocks


def test_new_running_and_resumed_requests_are_reported_separately():
    plan = StepPlan(10)
    run(plan, make_request("a", num_computed_tokens=3, num_output_tokens=1), 1)
    run(plan, make_request("b", num_computed_tokens=4, num_output_tokens=2), 1, blocks(5))
    new = make_request("c", num_computed_tokens=2)
    plan.add_admitted(new, 1, blocks(6, 7), is_new=True)
    resumed = make_request("d", num_computed_tokens=2, num_output_tokens=1)
    plan.add_admitted(resumed, 2, blocks(8, 9), is_new=False)
    assert plan.token_budget == 5
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 2}
    assert set(plan.requests()) == {"a", "b", "c", "d"}

    (new,) = plan.build_new()
    assert (new.req_id, new.prompt_token_ids, new.num_computed_tokens) == ("c", [1, 2, 3], 2)
    assert new.block_ids == ([6, 7],)
    cached = plan.build_cached()
    assert cached.req_ids == ["a", "b", "d"]
    assert cached.resumed_req_ids == {"d"}
    assert cached.new_block_ids == [None, ([5],), ([8, 9],)]
    assert cached.num_computed_tokens == [3, 4, 2]
    assert cached.num_output_tokens == [1, 2, 1]
    assert cached.all_token_ids == {"d": [1, 2, 3, 9]}


def test_placeholders_count_as_output_tokens():
    plan = StepPlan(10)
    request = make_request("a", num_computed_tokens=4, num_output_tokens=1)
    request.num_output_placeholders = 1
    run(plan, request, 1)
    assert plan.build_cached().num_output_tokens == [2]


def test_a_preempted_request_loses_its_tokens_and_is_not_reported_as_scheduled():
    plan = StepPlan(10)
    victim = make_request("a", num_computed_tokens=3, num_output_tokens=1)
    victim.spec_token_ids = [5, 6, 7]
    run(plan, victim, 4, blocks(1))
    plan.add_drafts(victim, 4)
    assert plan.spec_decode_tokens == {"a": [5, 6, 7]}
    other = make_request("b")
    run(plan, other, 1)
    plan.add_preempted(victim)
    plan.add_preempted(make_request("never scheduled"))
    assert (plan.token_budget, plan.num_scheduled_tokens) == (9, {"b": 1})
    assert (plan.spec_decode_tokens, plan.blocks, plan.requests()) == ({}, {}, {"b": other})
    assert plan.build_cached().req_ids == ["b"]
    assert plan.preempted_req_ids == {"a", "never scheduled"}


def test_drafts_past_the_scheduled_tokens_are_dropped():
    plan = StepPlan(10)
    request = make_request("a", num_computed_tokens=3, num_output_tokens=1)
    request.spec_token_ids = [5, 6, 7]
    plan.add_drafts(request, 2)
    assert (plan.spec_decode_tokens, request.spec_token_ids) == ({"a": [5]}, [])
    request.spec_token_ids = [5]
    plan = StepPlan(10)
    plan.add_drafts(request, 1)
    assert (plan.spec_decode_tokens, request.spec_token_ids) == ({}, [])


def test_built_output_does_not_change_with_the_request():
    plan = StepPlan(10)
    request = make_request("a", num_output_tokens=1)
    plan.add_admitted(request, 4, blocks(1), is_new=False)
    cached = plan.build_cached()
    request.append_output_tokens([8])
    assert cached.all_token_ids == {"a": [1, 2, 3, 9]}
